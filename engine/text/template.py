"""Runs a model's chat template in a sandbox."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from engine.errors import ModelError, RequestError
from engine.text.messages import Arguments
from engine.text.parts import DEFAULT_TEMPLATE, TOOL_TEMPLATE

# Templates are the model's own, but a request's variables can make one loop for long.
RENDER_SECONDS = 10.0
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "probe",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}


_PLAIN = (False, None, None, False)


class TemplateError(RequestError):
    """The model's chat template refuses these messages, or fails on them."""


class ChatTemplate:
    """The compiled templates of a model, with what they can do.

    `sources` maps names to Jinja source; "tool_use", where present, serves requests with tools. `tokens`
    are named tokens such as bos_token. Rendering is safe in several threads at once, and ends with an error
    at the first text that is written after `seconds`. Raises ModelError when the source is not valid Jinja.

    `source` is the text of the templates in use, `variables` the names that they read and nobody gives but a
    request. `takes_any_id`: ids of calls need not be nine letters and digits. `wants_null_content`: calls
    are shown only beside a content that is null, not empty.
    """

    def __init__(
        self, sources: Mapping[str, str], tokens: Mapping[str, str], *, seconds: float = RENDER_SECONDS
    ) -> None:
        environment = _environment()
        try:
            default = (
                sources[DEFAULT_TEMPLATE] if DEFAULT_TEMPLATE in sources else next(iter(sources.values()))
            )
            tools = sources.get(TOOL_TEMPLATE, default)
            self._plain, self._with_tools = environment.from_string(default), environment.from_string(tools)
            names = jinja2.meta.find_undeclared_variables(environment.parse(tools))
            plain_names = jinja2.meta.find_undeclared_variables(environment.parse(default))
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the model's chat template is not valid Jinja: {error}") from None
        self._tokens = dict(tokens)
        self._seconds = seconds
        self.source = default if tools is default else f"{default}\n{tools}"
        self.variables = frozenset((names | plain_names) - self.reserved - environment.globals.keys())
        self.takes_system = self._takes_system()
        self.takes_tools = "tools" in names and self._takes_tools()
        self.takes_developer = "developer" in default
        self.takes_any_id = self.show_call("call_probe_1") is not None or self.show_call("abcdefghi") is None
        self.wants_null_content = self.takes_tools and self._wants_null_content()

    @property
    def reserved(self) -> frozenset[str]:
        """Names that belong to the renderer: a request's own variables may not use them."""
        own = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
        calls = {"raise_exception", "strftime_now", "tokenize", "chat_template", "conversation"}
        return frozenset(own | calls | set(self._tokens))

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text. Raises TemplateError."""
        template = self._with_tools if tools else self._plain
        own = {"messages": messages, "tools": tools, "documents": None}
        variables = {**(extra or {}), **self._tokens, **own, "add_generation_prompt": add_generation_prompt}
        try:
            return "".join(self._in_time(template.generate(variables)))
        except TemplateError:
            raise
        except Exception as error:  # a template is a program: it can fail in any way
            raise TemplateError(
                f"the chat template fails on these messages: {error}", param="messages"
            ) from error

    def show_call(self, call_id: str, content: str | None = "") -> str | None:
        """A conversation in which "probe_tool" is called and answers, or None where that fails."""
        function = {"name": "probe_tool", "arguments": {"probe": "probe"}}
        calls = [{"id": call_id, "type": "function", "function": function}]
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": content, "tool_calls": calls},
            {"role": "tool", "tool_call_id": call_id, "name": "probe_tool", "content": "b"},
        ]
        try:
            return self.render(messages, [_PROBE_TOOL], add_generation_prompt=False)
        except TemplateError:
            return None

    def _in_time(self, pieces: Iterable[str]) -> Iterable[str]:
        end = time.monotonic() + self._seconds
        for piece in pieces:
            yield piece
            if time.monotonic() > end:
                raise TemplateError(
                    f"the chat template takes more than {self._seconds:g} s for these messages",
                    param="messages",
                )

    def _takes_system(self) -> bool:
        messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
        try:
            self.render(messages, None, add_generation_prompt=True)
        except TemplateError:
            return False
        return True

    def _takes_tools(self) -> bool:
        messages = [{"role": "user", "content": "a"}]
        try:
            without = self.render(messages, None, add_generation_prompt=True)
            return self.render(messages, [_PROBE_TOOL], add_generation_prompt=True) != without
        except TemplateError:
            return True

    def _wants_null_content(self) -> bool:
        shown = [self.show_call("abcdefghi", content) or "" for content in ("", None)]
        return "probe_tool" not in shown[0] and "probe_tool" in shown[1]


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant says, for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012 (declared so by the base class)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(value, Arguments) and (ensure_ascii, indent, separators, sort_keys) == _PLAIN:
        # As the model wrote them, so that the cache knows the reply again.
        return value.written
    # Jinja's own filter escapes <, > and & for HTML, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(str(message), param="messages")
