"""The bodies of replies and the events of streams. UNSET fields are left out, None is written as null."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from server.errors import ErrorObject

FinishReason = Literal["stop", "length", "tool_calls", "function_call"]
TokenIds = tuple[int, ...] | UnsetType
PerfMetrics = dict[str, str] | UnsetType


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Of the prompt's tokens, those whose attention state came from the cache, and those new in it."""

    cached_tokens: int
    cache_write_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Of the generated tokens, those that were reasoning."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a whole request. Each prompt counts once, however many choices it has; cached and newly
    stored tokens are part of prompt_tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


UsageField = Usage | None | UnsetType


class TopLogprob(msgspec.Struct, frozen=True, gc=False):
    """A token that could have stood there. `bytes` is empty for control tokens, which are no text."""

    token: str
    logprob: float
    bytes: tuple[int, ...]
    token_id: int


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """One token of a reply. `logprob` is 0 for a prompt's very first token, which nothing predicts;
    `text_offset` is where its text begins in the choice's."""

    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: tuple[TopLogprob, ...]
    token_id: int
    text_offset: int


class ContentLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities as chats have them."""

    content: tuple[TokenLogprobs, ...]


class LegacyLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities as completions have them; the lists go side by side."""

    tokens: tuple[str, ...]
    token_logprobs: tuple[float | None, ...]
    top_logprobs: tuple[dict[str, float] | None, ...] | None
    text_offset: tuple[int, ...]
    token_ids: tuple[int, ...]


if TYPE_CHECKING:
    Logprobs = ContentLogprobs | LegacyLogprobs
else:
    # For the schemas of replies, where msgspec takes no two structs side by side that have no tags.
    Logprobs = Annotated[
        Any,
        Meta(
            extra_json_schema={
                "anyOf": [
                    {"$ref": "#/components/schemas/ContentLogprobs"},
                    {"$ref": "#/components/schemas/LegacyLogprobs"},
                ]
            }
        ),
    ]


class RawOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What went into the model and came out of it, control tokens and all."""

    prompt_fragments: tuple[str, ...]
    prompt_token_ids: tuple[int, ...]
    completion: str
    completion_token_ids: tuple[int, ...]
    completion_logprobs: Logprobs | None = None
    images: None = None
    grammar: str | None = None


RawField = RawOutput | UnsetType


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A choice of a text completion, whole or as a piece of a stream."""

    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    prompt_token_ids: TokenIds = UNSET
    token_ids: TokenIds = UNSET
    raw_output: RawField = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A text completion, whole or as an event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[CompletionChoice, ...]
    usage: UsageField = UNSET
    service_tier: str | UnsetType = UNSET
    perf_metrics: PerfMetrics = UNSET


class FunctionText(msgspec.Struct, frozen=True, kw_only=True):
    """A called function and the JSON text of its arguments; in a stream the name comes once, the arguments
    in pieces."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call in a reply."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionText


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a call; id, type and name come with its first piece only."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionText


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of a chat."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[ToolCall, ...] | UnsetType = UNSET
    function_call: FunctionText | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A choice of a chat completion."""

    index: int
    message: ChatMessage
    logprobs: Logprobs | None = None
    finish_reason: FinishReason
    token_ids: TokenIds = UNSET
    raw_output: RawField = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[ChatChoice, ...]
    usage: Usage
    service_tier: str | UnsetType = UNSET
    perf_metrics: PerfMetrics = UNSET
    prompt_token_ids: TokenIds = UNSET


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What a chat's event adds; empty in the event that carries the finish reason."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[ToolCallDelta, ...] | UnsetType = UNSET
    function_call: FunctionText | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A choice's part in a chat's event."""

    index: int
    delta: ChatDelta
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: TokenIds = UNSET
    raw_output: RawField = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a chat's stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[ChatChunkChoice, ...]
    usage: UsageField = UNSET
    service_tier: str | UnsetType = UNSET
    perf_metrics: PerfMetrics = UNSET
    prompt_token_ids: TokenIds = UNSET


class ErrorEvent(msgspec.Struct, frozen=True):
    """What ends a stream that can't go on. `usage` tells what had been used until then."""

    error: ErrorObject
    usage: Usage


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model as /v1/models shows it. `context_length` counts prompt and reply together, in tokens."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    display_name: str
    created: int
    created_at: str
    owned_by: str = "headwater"
    context_length: int
    supports_chat: bool


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Body of GET /v1/models."""

    object: Literal["list"] = "list"
    data: tuple[ModelCard, ...]
    has_more: bool = False
    first_id: str
    last_id: str
