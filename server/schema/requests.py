"""The bodies of requests: what a client may send, with types and ranges."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine import RequestError
from server.schema import neutral, strict

Share = Annotated[float, Meta(ge=0.0, le=1.0)]
MAX_STOPS = 4


class StreamOptions(msgspec.Struct, frozen=True):
    """How a stream ends; what only steers another server's buffering is ignored."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    include_internal_content: bool | None = None
    buffer_tokens: int | None = None
    buffer_ms: float | None = None
    buffer_mode: str | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that both generating endpoints share. None is the same as absent everywhere."""

    model: str
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Share | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_isolation_key: str | None = None
    cache_salt: str | None = None
    prompt_cache_max_len: Annotated[int, Meta(ge=0)] | None = None
    context_length_exceeded_behavior: Literal["error", "truncate"] | None = None
    perf_metrics_in_response: bool | None = None
    return_token_ids: bool | None = None

    @property
    def token_limit(self) -> int | None:
        """The number of tokens that the client allows, or None."""
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens


class CompletionRequest(GenerateRequest, frozen=True, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: Any


class ChatRequest(GenerateRequest, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]]


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None


class TextPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a turn whose content is a list."""

    type: Literal["text"]
    text: str


def read_completion(body: bytes) -> CompletionRequest:
    """Decode and check a completions body. Raises RequestError."""
    fields = neutral.take_neutral(strict.loads(body), neutral.FIELDS)
    request = strict.convert(_options_checked(fields), CompletionRequest)
    _check_limits(request)
    return request


def read_chat(body: bytes) -> ChatRequest:
    """Decode and check a chat body. Raises RequestError."""
    fields = neutral.take_neutral(strict.loads(body), neutral.FIELDS)
    request = strict.convert(_options_checked(fields), ChatRequest)
    _check_limits(request)
    name = "max_tokens" if request.max_tokens is not None else "max_completion_tokens"
    if request.token_limit == 0:
        raise RequestError(f"'{name}' must be at least 1 for a chat; given: 0", param=name)
    return request


def read_messages(request: ChatRequest) -> list[dict[str, Any]]:
    """Check a chat's turns and bring them to the form that chat templates take."""
    if not request.messages:
        raise RequestError("'messages' must hold at least one message", param="messages")
    return [_read_message(f"messages.{i}.", fields) for i, fields in enumerate(request.messages)]


def read_prompts(prompt: Any, *, vocab_size: int, max_prompts: int) -> list[str | tuple[int, ...]]:
    """Bring the four forms of a prompt (text, texts, ids, lists of ids) to a list of prompts.

    Raises RequestError for another form, an empty list, or an id outside [0, vocab_size).
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise RequestError(
            "'prompt' must be a text, a list of texts, a list of token ids or a list of such lists",
            param="prompt",
        )
    if not prompt:
        raise RequestError("'prompt' is empty", param="prompt")
    if type(prompt[0]) is int:
        return [_token_ids(prompt, vocab_size)]
    if len(prompt) > max_prompts:
        raise RequestError(
            f"'prompt' holds {len(prompt)} prompts; at most {max_prompts} are taken", param="prompt"
        )
    if all(isinstance(item, str) for item in prompt):
        return list(prompt)
    return [_token_ids(item, vocab_size) for item in prompt]


def read_stops(stop: str | list[str] | None, *, max_chars: int) -> tuple[str, ...]:
    """Return the stop strings; null, absent and [] are the same. Raises RequestError."""
    stops = [stop] if isinstance(stop, str) else (stop or [])
    if len(stops) > MAX_STOPS:
        raise RequestError(f"'stop' may hold at most {MAX_STOPS} strings; given: {len(stops)}", param="stop")
    for text in stops:
        if not text:
            raise RequestError("'stop' may not hold an empty string: it would match everywhere", param="stop")
        if len(text) > max_chars:
            raise RequestError(
                f"'stop' strings may have at most {max_chars} characters; given: {len(text)}", param="stop"
            )
    return tuple(stops)


def _token_ids(ids: Any, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(ids, list):
        raise RequestError(
            f"'prompt' mixes kinds: a list of token ids was expected; given: {strict.shown(ids)}",
            param="prompt",
        )
    if not ids:
        raise RequestError("'prompt' holds an empty list of token ids", param="prompt")
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise RequestError(
                f"'prompt' holds {strict.shown(token_id)}, which is not a token id: "
                f"an integer from 0 to {vocab_size - 1} was expected",
                param="prompt",
            )
    return tuple(ids)


def _options_checked(fields: dict[str, Any]) -> dict[str, Any]:
    options = fields.get("stream_options")
    if isinstance(options, dict):
        strict.convert(options, StreamOptions, at="stream_options.")
    return fields


def _check_limits(request: GenerateRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise RequestError("'stream_options' is only allowed when 'stream' is true", param="stream_options")
    both = (request.max_tokens, request.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise RequestError(
            f"'max_tokens' ({both[0]}) and 'max_completion_tokens' ({both[1]}) differ: give one of them",
            param="max_completion_tokens",
        )


def _read_message(at: str, fields: dict[str, Any]) -> dict[str, Any]:
    message = strict.convert(neutral.take_neutral(fields, neutral.MESSAGE, at=at), Message, at=at)
    if message.content is None:
        raise RequestError(f"'{at}content' is required", param=at + "content")
    content = message.content
    if isinstance(content, list):
        content = "".join(_read_part(f"{at}content.{i}.", part) for i, part in enumerate(content))
    # "developer" is the newer name of the system role; templates know only the old one.
    turn = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.name is not None:
        turn["name"] = message.name
    if message.reasoning_content is not None:
        turn["reasoning_content"] = message.reasoning_content
    return turn


def _read_part(at: str, fields: dict[str, Any]) -> str:
    kind = fields.get("type")
    if isinstance(kind, str) and kind != "text":
        raise RequestError(
            f"'{at}type' {strict.shown(kind)} is not supported by this server: it reads text only",
            param=at + "type",
        )
    return strict.convert(fields, TextPart, at=at).text
