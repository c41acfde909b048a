"""The bodies of replies and the events of streams. UNSET fields are left out, None is written as null."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

FinishReason = Literal["stop", "length"]
TokenIds = tuple[int, ...] | UnsetType
PerfMetrics = dict[str, str] | UnsetType


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Of the prompt's tokens, those whose attention state came from the cache."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a whole request; cached ones are part of prompt_tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


UsageField = Usage | None | UnsetType


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A choice of a text completion, whole or as a piece of a stream."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: FinishReason | None = None
    prompt_token_ids: TokenIds = UNSET
    token_ids: TokenIds = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A text completion, whole or as an event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[CompletionChoice, ...]
    usage: UsageField = UNSET
    perf_metrics: PerfMetrics = UNSET


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of a chat."""

    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A choice of a chat completion."""

    index: int
    message: ChatMessage
    logprobs: None = None
    finish_reason: FinishReason
    token_ids: TokenIds = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[ChatChoice, ...]
    usage: Usage
    perf_metrics: PerfMetrics = UNSET
    prompt_token_ids: TokenIds = UNSET


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What a chat's event adds; empty in the event that carries the finish reason."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A choice's part in a chat's event."""

    index: int
    delta: ChatDelta
    logprobs: None = None
    finish_reason: FinishReason | None = None
    token_ids: TokenIds = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a chat's stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[ChatChunkChoice, ...]
    usage: UsageField = UNSET
    perf_metrics: PerfMetrics = UNSET
    prompt_token_ids: TokenIds = UNSET


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model as /v1/models shows it. `context_length` counts prompt and reply together, in tokens."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "headwater"
    context_length: int
    supports_chat: bool


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Body of GET /v1/models."""

    object: Literal["list"] = "list"
    data: tuple[ModelCard, ...]
