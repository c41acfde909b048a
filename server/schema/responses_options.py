"""What a request of /v1/responses may hold beside its input: tools, the form of its text, reasoning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine import RequestError
from server.schema import strict

_NAME = "^[a-zA-Z0-9_-]{1,64}$"
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
SummaryKind = Literal["auto", "concise", "detailed"]


class ResponseStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a stream looks."""

    include_obfuscation: Annotated[
        bool | None, Meta(description="Accepted and ignored: events are never padded")
    ] = None


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call, in the flat shape of this endpoint."""

    type: Annotated[Literal["function"], Meta(description="Kind of tool: functions only")]
    name: Annotated[str, Meta(pattern=_NAME, description="The function's name, unique in the request")]
    description: Annotated[str | None, Meta(description="What it does, shown to the model")] = None
    parameters: Annotated[
        dict[str, Any] | None, Meta(description="JSON schema of its arguments, an object's")
    ] = None
    strict: Annotated[
        bool | None,
        Meta(description="Accepted; calls that tool_choice requires follow the schema either way"),
    ] = None
    output_schema: Annotated[
        dict[str, Any] | None, Meta(description="Accepted and ignored: results are taken as text")
    ] = None
    allowed_callers: Annotated[
        list[Literal["direct", "programmatic"]] | None,
        Meta(description='Who may call it: only ["direct"]; programs are refused'),
    ] = None
    defer_loading: Annotated[
        bool | None, Meta(description="Refused unless false: all tools are in the prompt")
    ] = None
    run_async: Annotated[
        bool | None, Meta(description="Refused unless false: a call is answered in the next request")
    ] = msgspec.field(name="async", default=None)


class AllowedTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the tools that a choice allows."""

    type: Annotated[Literal["function"], Meta(description="Kind of tool: functions only")]
    name: Annotated[str, Meta(description="The function's name")]


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A choice of tools that names some: one function to call, or those among which to choose."""

    type: Annotated[
        Literal["function", "allowed_tools"],
        Meta(description="Whether one function must be called, or some may"),
    ]
    name: Annotated[str | None, Meta(description="The function to call, with type function")] = None
    mode: Annotated[
        Literal["auto", "required"] | None,
        Meta(description="Whether one of them must be called, with type allowed_tools"),
    ] = None
    tools: Annotated[
        list[AllowedTool] | None, Meta(description="The functions allowed, with type allowed_tools")
    ] = None


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the reply's text must be."""

    type: Annotated[
        Literal["text", "json_object", "json_schema"],
        Meta(description="Free text, any JSON object, or a schema's"),
    ]
    name: Annotated[
        Annotated[str, Meta(pattern=_NAME)] | None,
        Meta(description="The schema's name, required with one"),
    ] = None
    schema: Annotated[
        dict[str, Any] | None, Meta(description="The JSON schema, required with type json_schema")
    ] = None
    description: Annotated[str | None, Meta(description="Accepted and ignored: what the schema is for")] = (
        None
    )
    strict: Annotated[bool | None, Meta(description="Accepted; the reply follows the schema either way")] = (
        None
    )


class TextConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the reply's text is made."""

    format: Annotated[TextFormat | None, Meta(description="Free text, JSON, or JSON of a schema")] = None
    verbosity: Annotated[
        Literal["low", "medium", "high"] | None,
        Meta(description="Accepted and ignored: models served here know no such control"),
    ] = None


class Reasoning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much a model that reasons does so."""

    effort: Annotated[
        Effort | None, Meta(description="Whether to reason; only none is taken by a model that does not")
    ] = None
    summary: Annotated[
        SummaryKind | None,
        Meta(description="Accepted and ignored: the reasoning itself is in the reply, not a summary"),
    ] = None
    generate_summary: Annotated[
        SummaryKind | None, Meta(description="Accepted and ignored: the older name of summary")
    ] = None
    context: Annotated[
        Literal["auto", "current_turn", "all_turns"] | None,
        Meta(description="Accepted and ignored: the model's template says which reasoning it sees again"),
    ] = None
    mode: Annotated[
        Literal["standard"] | None, Meta(description="Accepted and ignored: there is one mode")
    ] = None


class CacheOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What another server's cache would be told; here every prompt is cached, to the token."""

    mode: Annotated[Literal["implicit", "explicit"] | None, Meta(description="Accepted and ignored")] = None
    ttl: Annotated[Literal["30m", "12h"] | None, Meta(description="Accepted and ignored")] = None
    prewarm: Annotated[bool | None, Meta(description="Accepted and ignored")] = None
    comparison_response_id: Annotated[str | None, Meta(description="Accepted and ignored")] = None


def check_tools(tools: Any) -> None:
    if not isinstance(tools, list):
        return
    for i, tool in enumerate(tools):
        at = f"tools.{i}."
        if not isinstance(tool, dict):
            continue
        _functions_only(tool, at)
        checked = strict.convert(tool, FunctionTool, at=at)
        for name, asked in (
            ("allowed_callers", "programmatic" in (checked.allowed_callers or ())),
            ("defer_loading", checked.defer_loading),
            ("async", checked.run_async),
        ):
            if asked:
                raise RequestError(
                    f"'{at}{name}' {strict.shown(tool[name])} is not supported by this server: "
                    "functions are in the prompt, called directly and answered in the next request",
                    param=at + name,
                )


def check_choice(choice: Any) -> None:
    if not isinstance(choice, dict):
        return
    at = "tool_choice."
    if choice.get("type") != "allowed_tools":
        _functions_only(choice, at)
    for i, tool in enumerate(choice["tools"] if isinstance(choice.get("tools"), list) else ()):
        if isinstance(tool, dict):
            _functions_only(tool, f"{at}tools.{i}.")
            strict.convert(tool, AllowedTool, at=f"{at}tools.{i}.")
    checked = strict.convert(choice, ToolChoice, at=at)
    named = checked.type == "function"
    for name, wanted in (("name", named), ("mode", not named), ("tools", not named)):
        if (getattr(checked, name) is not None) != wanted:
            words = "is required" if wanted else "is not allowed"
            raise RequestError(
                f"'{at}{name}' {words} with type {strict.shown(checked.type)}", param=at + name
            )


def _functions_only(tool: dict[str, Any], at: str) -> None:
    kind = tool.get("type")
    if isinstance(kind, str) and kind != "function":
        raise RequestError(
            f"'{at}type' {strict.shown(kind)} is not supported by this server: it has no built-in tools, "
            "only functions that the client runs",
            param=at + "type",
        )


def check_format(wanted: TextFormat | None) -> None:
    if wanted is None:
        return
    for name in ("name", "schema"):
        given = getattr(wanted, name) is not None
        if given != (wanted.type == "json_schema"):
            words = "is not allowed" if given else "is required"
            raise RequestError(
                f"'text.format.{name}' {words} with type {strict.shown(wanted.type)}",
                param=f"text.format.{name}",
            )
