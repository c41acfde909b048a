"""Tools that a chat may call, which of them it may or must, and the form that replies must have."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from engine import RequestError
from engine.text import GrammarSpec, GrammarTool
from server.schema import strict
from server.schema.requests import ChatRequest, JsonSchema, ResponseFormat

MAX_TOOLS = 128
NAME = r"^[a-zA-Z0-9_.-]{1,64}$"


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: Annotated[str, Meta(pattern=NAME)]
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, Meta(description="JSON schema of the arguments")] = None
    strict: Annotated[bool | None, Meta(description="Accepted; see tool_choice")] = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `tools`."""

    type: Literal["function"]
    function: dict[str, Any]


class Choice(NamedTuple):
    """What a reply may call.

    `tools` are shown to the model. `callable` names those that count as calls, none of them where the reply
    is text only; where `required` it is calls only, of those. `parallel` says whether there may be several.
    """

    tools: tuple[dict[str, Any], ...] = ()
    callable: tuple[str, ...] = ()
    required: bool = False
    parallel: bool = True
    legacy: bool = False

    def grammar_tools(self) -> list[GrammarTool]:
        """Names and argument schemas of what may be called."""
        functions = [tool["function"] for tool in self.tools]
        return [GrammarTool(f["name"], f["parameters"]) for f in functions if f["name"] in self.callable]


def read_tools(request: ChatRequest) -> Choice:
    """Check tools and the choice among them, in the newer or the older form. Raises RequestError."""
    legacy = request.functions is not None
    if legacy:
        functions = request.functions or []
        tools = [_function(f"functions.{i}.", fields) for i, fields in enumerate(functions)]
    else:
        tools = [_tool(f"tools.{i}.", fields) for i, fields in enumerate(request.tools or [])]
    field = "functions" if legacy else "tools"
    if len(tools) > MAX_TOOLS:
        raise RequestError(
            f"'{field}' may hold at most {MAX_TOOLS} functions; given: {len(tools)}", param=field
        )
    names = [tool["function"]["name"] for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise RequestError(f"'{field}' has two functions named {strict.shown(name)}", param=field)
    if legacy or request.function_call is not None:
        callable, required = _choose("function_call", _newer(request.function_call), names)
    else:
        callable, required = _choose("tool_choice", request.tool_choice, names)
    parallel = request.parallel_tool_calls is not False and not legacy
    return Choice(tuple(tools), tuple(callable), required, parallel, legacy)


def read_format(given: ResponseFormat | None) -> tuple[GrammarSpec, str] | None:
    """Return the form a reply must have and the field that holds it; None for plain text.

    Raises RequestError.
    """
    if given is None or given.type == "text":
        return None
    if given.type == "grammar":
        if given.grammar is None or not given.grammar.strip():
            raise RequestError(
                "'response_format.grammar' is required with type \"grammar\"", param="response_format.grammar"
            )
        return GrammarSpec("gbnf", given.grammar), "response_format.grammar"
    framed = given.json_schema
    if framed is not None and framed.strict and framed.name is None:
        raise RequestError(
            "'response_format.json_schema.name' is required", param="response_format.json_schema.name"
        )
    schema, field = _schema(given.schema, framed)
    if schema is not None:
        return GrammarSpec("json_schema", schema), field
    if given.type == "json_object":
        return GrammarSpec("json_object"), "response_format"
    missing = "response_format.json_schema" + ("" if framed is None else ".schema")
    raise RequestError(f"'{missing}' is required with type \"json_schema\"", param=missing)


def _schema(bare: dict[str, Any] | str | None, framed: JsonSchema | None) -> tuple[str | None, str]:
    if framed is not None and framed.schema is not None:
        return _schema_text(framed.schema, "response_format.json_schema.schema")
    return (None, "") if bare is None else _schema_text(bare, "response_format.schema")


def _schema_text(schema: dict[str, Any] | str, field: str) -> tuple[str, str]:
    if isinstance(schema, str):
        try:
            schema = strict.loads(schema.encode())
        except RequestError as exc:
            raise RequestError(f"'{field}' is no JSON schema: {exc}", param=field) from None
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":")), field


def _tool(at: str, fields: Any) -> dict[str, Any]:
    kind = fields.get("type")
    if isinstance(kind, str) and kind != "function":
        raise RequestError(
            f"'{at}type' {strict.shown(kind)} is not supported by this server: it takes functions only",
            param=at + "type",
        )
    tool = strict.convert(fields, Tool, at=at)
    return _function(at + "function.", tool.function)


def _function(at: str, fields: Any) -> dict[str, Any]:
    strict.convert(fields, Function, at=at)
    given = {name: value for name, value in fields.items() if value is not None and name != "strict"}
    # Templates read all three.
    return {"type": "function", "function": {"description": "", "parameters": {"type": "object"}} | given}


def _newer(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """Bring a function_call to the form of a tool_choice."""
    if isinstance(choice, dict):
        return {"type": "function", "function": choice}
    return choice


def _choose(
    field: str, choice: str | dict[str, Any] | None, names: Sequence[str]
) -> tuple[Sequence[str], bool]:
    """Return what may be called, and whether something must be."""
    if choice is None:
        return names, False
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required", "any"):
            raise RequestError(
                f'\'{field}\' must be "none", "auto", "required" or one function; given: '
                f"{strict.shown(choice)}",
                param=field,
            )
        if choice in ("required", "any") and not names:
            raise RequestError(f"'{field}' asks for a call, but there are no tools", param=field)
        return ((), False) if choice == "none" else (names, choice != "auto")
    if choice.get("type") == "allowed_tools":
        return _allowed(field, choice, names)
    return [_named(field, choice, names)], True


def _allowed(field: str, choice: dict[str, Any], names: Sequence[str]) -> tuple[Sequence[str], bool]:
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list):
        raise RequestError(f"'{field}.allowed_tools' must hold a list of tools", param=field)
    mode = allowed.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise RequestError(
            f'\'{field}.allowed_tools.mode\' must be "auto" or "required"; given: {strict.shown(mode)}',
            param=field,
        )
    return [_named(field, tool, names) for tool in allowed["tools"]], mode == "required"


def _named(field: str, choice: Any, names: Sequence[str]) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(choice, dict) or choice.get("type") != "function" or not isinstance(name, str):
        raise RequestError(
            f'\'{field}\' must name a function as {{"type": "function", "function": {{"name": ...}}}}; '
            f"given: {strict.shown(choice)}",
            param=field,
        )
    if name not in names:
        raise RequestError(f"'{field}' names {strict.shown(name)}, which is none of the tools", param=field)
    return name
