"""The bodies of Anthropic's Messages API: what a client may send, with types and ranges.

None is the same as absent everywhere. All structs are closed: one conversion finds unknown names in any
depth.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from engine import RequestError
from server.schema import strict
from server.schema.anthropic_parts import (
    Block,
    CacheMark,
    Closed,
    CustomTool,
    JsonSchemaFormat,
    MessagesMetadata,
    MessageTurn,
    OutputConfig,
    TextBlock,
    ThinkingAdaptive,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolChoiceAny,
    ToolChoiceAuto,
    ToolChoiceNone,
    ToolChoiceTool,
    ToolResultBlock,
    ToolUseBlock,
)
from server.schema.requests import MAX_STOPS

T = TypeVar("T", bound=Closed)

# Fields of the API for what this server does not have, each with the values that ask for nothing.
ABSENT: dict[str, tuple[Any, ...]] = {
    "billing_policy": (),
    "compaction": (),
    "container": (),
    "context_management": (
        {},
        {"edits": []},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ),
    "fallback_credit_token": (),
    "fallbacks": ([],),
    "inference_geo": (),
    "mcp_servers": ([],),
    "raw_output": (False,),
    "speed": ("standard",),
    "thread": (),
}

_TURNS = ("messages", "system")


class ThreadUnsupported(RequestError):
    """The server is to keep the conversation, which it doesn't. Clients know the code and send all of it."""

    code = "thread_unsupported_request"


class Conversation(Closed, frozen=True, kw_only=True):
    """The fields of which a prompt is made."""

    model: Annotated[str, Meta(description="A served model")]
    messages: Annotated[list[MessageTurn], Meta(min_length=1, description="The turns so far")]
    system: Annotated[
        str | list[TextBlock] | None, Meta(description="The system prompt, as a text or as text blocks")
    ] = None
    tools: Annotated[list[CustomTool] | None, Meta(description="Tools that the model may call")] = None
    tool_choice: Annotated[
        ToolChoiceAuto | ToolChoiceAny | ToolChoiceTool | ToolChoiceNone | None,
        Meta(description="Whether a tool may or must be called"),
    ] = None
    thinking: Annotated[
        ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None,
        Meta(description="Whether a model that can think does; by default its template decides"),
    ] = None
    output_config: Annotated[
        OutputConfig | None, Meta(description="Degree of effort, and structured output")
    ] = None
    cache_control: CacheMark = None


class CountTokensRequest(Conversation, frozen=True, kw_only=True):
    """Body of POST /v1/messages/count_tokens."""


class MessagesRequest(Conversation, frozen=True, kw_only=True):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="Tokens to generate at most, thinking included; 0 only puts the prompt in the cache",
        ),
    ]
    stop_sequences: Annotated[
        list[str] | None, Meta(description=f"Texts that end the reply, at most {MAX_STOPS}")
    ] = None
    stream: Annotated[bool | None, Meta(description="Whether the reply comes as server-sent events")] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0.0, le=1.0)] | None,
        Meta(description="Randomness; 0 is greedy. Default: the model's, else 1"),
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(ge=0.0, le=1.0)] | None,
        Meta(description="Share of probability that the tokens to choose from make up"),
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="Number of tokens to choose from; 0 is all")
    ] = None
    metadata: Annotated[MessagesMetadata | None, Meta(description="About the request")] = None
    service_tier: Annotated[
        Literal["auto", "standard_only", "default", "flex", "scale", "priority", "fast"] | None,
        Meta(description="priority: first in the queue and last to be shed; the others: in turn"),
    ] = None
    output_format: Annotated[
        JsonSchemaFormat | None, Meta(description="The older name of output_config.format")
    ] = None
    diagnostics: Annotated[
        dict[str, Any] | None, Meta(description="Accepted and ignored: the reply's diagnostics are null")
    ] = None
    user: Annotated[str | None, Meta(description="Opaque name of the user, an affinity hint")] = None
    prompt_cache_key: Annotated[
        str | None, Meta(description="Affinity hint: requests with one key go to one place")
    ] = None
    prompt_cache_isolation_key: Annotated[
        str | None, Meta(description="Requests share cached prompts only with those of the same key")
    ] = None
    prompt_cache_max_len: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="Tokens of the prompt that may come from the cache at most; 0 is none"),
    ] = None


def read_messages(body: bytes) -> MessagesRequest:
    """Decode and check a body of /v1/messages. Raises RequestError."""
    request = _convert(_present(strict.loads(body)), MessagesRequest)
    _check_conversation(request)
    stops = request.stop_sequences or []
    if len(stops) > MAX_STOPS:
        raise RequestError(
            f"'stop_sequences' may hold at most {MAX_STOPS} texts; given: {len(stops)}",
            param="stop_sequences",
        )
    if "" in stops:
        raise RequestError(
            "'stop_sequences' may not hold an empty text: it would match everywhere", param="stop_sequences"
        )
    if request.output_format is not None and request.output_config and request.output_config.format:
        raise RequestError(
            "'output_format' is the older name of 'output_config.format': give one of them",
            param="output_format",
        )
    return request


def read_count_tokens(body: bytes) -> CountTokensRequest:
    """Decode and check a body of /v1/messages/count_tokens. Raises RequestError."""
    request = _convert(_present(strict.loads(body)), CountTokensRequest)
    _check_conversation(request)
    return request


def _present(fields: dict[str, Any]) -> dict[str, Any]:
    # Without what this server does not have; an error where it is asked for.
    found = {}
    for name, value in fields.items():
        if name not in ABSENT:
            found[name] = value
        elif value is not None and not any(_same(value, neutral) for neutral in ABSENT[name]):
            kind = ThreadUnsupported if name == "thread" else RequestError
            raise kind(f"'{name}' is not supported by this server; given: {strict.shown(value)}", param=name)
    _refuse_server_tools(fields.get("tools"))
    return found


def _same(value: Any, neutral: Any) -> bool:
    # 0 == False in Python, but not in JSON.
    return type(value) is type(neutral) and bool(value == neutral)


def _refuse_server_tools(tools: Any) -> None:
    # Said before their own fields are found to be unknown.
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            raise RequestError(
                f"'tools.{index}.type' {strict.shown(kind)} is not supported by this server: it takes custom "
                "tools, which have a name and an input_schema, and runs none itself",
                param=f"tools.{index}.type",
            )


def _convert(fields: dict[str, Any], struct: type[T]) -> T:
    """Check `fields` against a closed struct. Raises RequestError naming the field and its value."""
    try:
        return msgspec.convert(fields, struct)
    except msgspec.ValidationError as exc:
        fault = strict.locate(fields, str(exc))
        if _other_kind(fault):
            raise RequestError(
                f"'{fault.path}' {strict.shown(fault.value)} is not supported by this server here: it reads "
                "text, tool calls and their results",
                param=fault.path,
            ) from None
        raise strict.invalid(fault, struct) from None


def _other_kind(fault: strict.Fault) -> bool:
    """Whether a block is of a kind that this server doesn't read."""
    steps = fault.steps
    return fault.what.startswith("Invalid value '") and steps[-1:] == ("type",) and steps[0] in _TURNS


def _check_conversation(request: Conversation) -> None:
    called: set[str] = set()
    for index, turn in enumerate(request.messages):
        if isinstance(turn.content, list):
            for at, block in enumerate(turn.content):
                _check_block(turn.role, block, f"messages.{index}.content.{at}", called)
    names: set[str] = set()
    for index, tool in enumerate(request.tools or ()):
        _check_tool(tool, f"tools.{index}", names)
        names.add(tool.name)
    _check_choice(request, names)


def _check_block(role: str, block: Block, at: str, called: set[str]) -> None:
    if isinstance(block, TextBlock):
        return
    if role != ("user" if isinstance(block, ToolResultBlock) else "assistant"):
        kind = block.__struct_config__.tag
        raise RequestError(
            f"'{at}.type' {strict.shown(kind)} may not stand in a turn of the {role}",
            param=f"{at}.type",
        )
    if isinstance(block, ToolUseBlock):
        called.add(block.id)
    elif isinstance(block, ToolResultBlock) and block.tool_use_id not in called:
        raise RequestError(
            f"'{at}.tool_use_id' {strict.shown(block.tool_use_id)} is the id of no tool_use block before it",
            param=f"{at}.tool_use_id",
        )


def _check_tool(tool: CustomTool, at: str, names: set[str]) -> None:
    if tool.name in names:
        raise RequestError(
            f"'{at}.name' {strict.shown(tool.name)} is the name of an earlier tool too", param=f"{at}.name"
        )
    kind = tool.input_schema.get("type", "object")
    if kind != "object":
        raise RequestError(
            f"'{at}.input_schema.type' must be \"object\"; given: {strict.shown(kind)}",
            param=f"{at}.input_schema.type",
        )


def _check_choice(request: Conversation, names: set[str]) -> None:
    choice = request.tool_choice
    if isinstance(choice, ToolChoiceAny) and not names:
        raise RequestError("'tool_choice' any needs 'tools'", param="tool_choice")
    if isinstance(choice, ToolChoiceTool) and choice.name not in names:
        raise RequestError(
            f"'tool_choice.name' {strict.shown(choice.name)} is the name of none of 'tools'",
            param="tool_choice.name",
        )
