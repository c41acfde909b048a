"""Runs a model's chat template in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from engine.errors import ModelError, RequestError
from engine.text.parts import DEFAULT_TEMPLATE, TOOL_TEMPLATE

_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "probe",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}


class TemplateError(RequestError):
    """The model's chat template refuses these messages, or fails on them."""


class ChatTemplate:
    """The compiled templates of a model, with what they can do.

    `sources` maps names to Jinja source; "tool_use", where present, serves requests with tools. `tokens`
    are named tokens such as bos_token. Rendering is safe in several threads at once. Raises ModelError
    when the source is not valid Jinja.
    """

    def __init__(self, sources: Mapping[str, str], tokens: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            default = (
                sources[DEFAULT_TEMPLATE] if DEFAULT_TEMPLATE in sources else next(iter(sources.values()))
            )
            tools = sources.get(TOOL_TEMPLATE, default)
            self._plain, self._with_tools = environment.from_string(default), environment.from_string(tools)
            names = jinja2.meta.find_undeclared_variables(environment.parse(tools))
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the model's chat template is not valid Jinja: {error}") from None
        self._tokens = dict(tokens)
        self.takes_system = self._takes_system()
        self.takes_tools = "tools" in names and self._takes_tools()
        self.takes_developer = "developer" in default

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
            return template.render(variables)
        except TemplateError:
            raise
        except Exception as error:  # a template is a program: it can fail in any way
            raise TemplateError(
                f"the chat template fails on these messages: {error}", param="messages"
            ) from error

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
    # Jinja's own filter escapes <, > and & for HTML, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(str(message), param="messages")
