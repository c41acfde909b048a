"""The bodies of requests: what a client may send, with types and ranges."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine import RequestError
from server.schema import neutral, strict

MAX_STOPS = 4
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_LEGACY_LOGPROBS = 5
MAX_METADATA = 16

Count = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Metadata = dict[
    Annotated[str, Meta(max_length=64)],
    Annotated[str, Meta(max_length=512)],
]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a stream ends; what only steers another server's buffering is ignored."""

    include_usage: Annotated[
        bool | None,
        Meta(
            description="true: usage comes in an event of its own after the last choice, and is null before; "
            "false: no usage; absent: usage comes with the last finish_reason"
        ),
    ] = None
    include_obfuscation: Annotated[bool | None, Meta(description="Ignored")] = None
    include_internal_content: Annotated[bool | None, Meta(description="Ignored")] = None
    buffer_tokens: Annotated[int | None, Meta(description="Ignored")] = None
    buffer_ms: Annotated[float | None, Meta(description="Ignored")] = None
    buffer_mode: Annotated[str | None, Meta(description="Ignored")] = None


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON schema with OpenAI's frame around it."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")] | None = None
    schema: dict[str, Any] | str | None = None
    strict: Annotated[bool | None, Meta(description="Replies follow the schema either way")] = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What form a reply must have."""

    type: Literal["text", "json_object", "json_schema", "grammar"]
    json_schema: Annotated[
        JsonSchema | None, Meta(description="For json_schema: the schema, framed as OpenAI does")
    ] = None
    schema: Annotated[
        dict[str, Any] | str | None, Meta(description="For json_object and json_schema: a bare schema")
    ] = None
    grammar: Annotated[str | None, Meta(description="For grammar: the grammar, in GBNF")] = None


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether a model that can reason does so."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1024)] | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that both generating endpoints share. None is the same as absent everywhere."""

    model: Annotated[str, Meta(description="Name of the served model")]
    max_tokens: Annotated[Count | None, Meta(description="Most tokens a choice may generate")] = None
    max_completion_tokens: Annotated[Count | None, Meta(description="Same as max_tokens")] = None
    context_length_exceeded_behavior: Annotated[
        Literal["error", "truncate"] | None,
        Meta(description="Where max_tokens doesn't fit the context: refuse, or generate what fits (default)"),
    ] = None
    n: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None,
        Meta(description="Choices for each prompt; default 1"),
    ] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0.0, le=2.0)] | None,
        Meta(description="0 takes the likeliest token; default: the model's own, else 1"),
    ] = None
    top_p: Annotated[
        Share | None,
        Meta(description="Keep the likeliest tokens of this mass; default: the model's own, else 1"),
    ] = None
    top_k: Annotated[
        Count | None,
        Meta(description="Keep so many of the likeliest tokens; 0 is off; default: the model's own, else 0"),
    ] = None
    min_p: Annotated[
        Share | None, Meta(description="Drop tokens below this share of the likeliest one's probability")
    ] = None
    typical_p: Annotated[
        Annotated[float, Meta(gt=0.0, le=1.0)] | None,
        Meta(description="Keep the tokens of this mass whose surprise is nearest the expected; 1 is off"),
    ] = None
    frequency_penalty: Annotated[
        Penalty | None, Meta(description="Taken off a token's logit for each time it was generated")
    ] = None
    presence_penalty: Annotated[
        Penalty | None, Meta(description="Taken off a token's logit once it was generated")
    ] = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(gt=0.0, le=2.0)] | None,
        Meta(description="Makes tokens of prompt and output less likely above 1, more likely below"),
    ] = None
    mirostat_target: Annotated[
        Annotated[float, Meta(ge=0.0, le=1e6)] | None,
        Meta(description="Perplexity that sampling steers to; 0 is off"),
    ] = None
    mirostat_lr: Annotated[
        Annotated[float, Meta(ge=0.0, le=10.0)] | None, Meta(description="How fast it does; default 0.1")
    ] = None
    logit_bias: Annotated[
        dict[str, Any] | None,
        Meta(
            description="Token id to a number from -100 to 100, added to its logit",
            extra_json_schema={"additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
        ),
    ] = None
    seed: Annotated[
        Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None,
        Meta(description="Same seed, same request: same reply"),
    ] = None
    stop: Annotated[
        str | list[str] | None,
        Meta(
            description=f"Up to {MAX_STOPS} texts that end a reply, not shown; token ids and "
            "log-probabilities go up to the token that completed one"
        ),
    ] = None
    stop_token_ids: Annotated[
        list[Count] | None, Meta(description="More tokens that end a reply, not shown")
    ] = None
    min_tokens: Annotated[
        Count | None, Meta(description="Tokens before an end token may come; stop texts count at once")
    ] = None
    ignore_eos: Annotated[bool | None, Meta(description="Generate on behind the model's end token")] = None
    stream: Annotated[bool | None, Meta(description="Send the reply as server-sent events")] = None
    stream_options: StreamOptions | None = None
    logprobs: Annotated[
        bool | Annotated[int, Meta(ge=0, le=MAX_LEGACY_LOGPROBS)] | None,
        Meta(description="true: log-probabilities as chats have them; a number: as completions have them"),
    ] = None
    top_logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None,
        Meta(description="With logprobs true: so many likeliest tokens beside each"),
    ] = None
    echo: Annotated[bool | None, Meta(description="Put the prompt in front of each choice")] = None
    echo_last: Annotated[
        Count | None, Meta(description="Put the prompt's last so many tokens in front of each choice")
    ] = None
    response_format: Annotated[ResponseFormat | None, Meta(description="Form that replies must have")] = None
    reasoning_effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "adaptive"]
        | bool
        | Annotated[int, Meta(ge=0)]
        | None,
        Meta(description="For models that reason: whether they do"),
    ] = None
    thinking: Annotated[Thinking | None, Meta(description="Same as reasoning_effort, another way")] = None
    prediction: Annotated[Any, Meta(description="Accepted; nothing is predicted from it")] = None
    speculation: Annotated[Any, Meta(description="Accepted; nothing is predicted from it")] = None
    raw_output: Annotated[
        bool | None, Meta(description="Add to each choice what went in and came out, to the token")
    ] = None
    return_token_ids: Annotated[bool | None, Meta(description="Add the ids of prompt and reply")] = None
    perf_metrics_in_response: Annotated[
        bool | None, Meta(description="Add times and cache figures to the body")
    ] = None
    metadata: Annotated[
        Metadata | None,
        Meta(description=f"Accepted and ignored: up to {MAX_METADATA} pairs, which are not kept"),
    ] = None
    service_tier: Annotated[
        Literal["auto", "default", "flex", "scale", "priority", "fast"] | None,
        Meta(description="priority: first in the queue, last to be refused; all others are the default"),
    ] = None
    user: Annotated[str | None, Meta(description="Whose request it is: routes like prompt_cache_key")] = None
    prompt_cache_key: Annotated[
        str | None, Meta(description="Requests of one key are sent to one replica, where there are several")
    ] = None
    prompt_cache_isolation_key: Annotated[
        str | None, Meta(description="Requests of different keys share no cache")
    ] = None
    cache_salt: Annotated[str | None, Meta(description="Same as prompt_cache_isolation_key")] = None
    prompt_cache_max_len: Annotated[
        Count | None, Meta(description="Most prompt tokens that may come from the cache; 0 is none")
    ] = None

    @property
    def token_limit(self) -> int | None:
        """The number of tokens that the client allows, or None."""
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens

    @property
    def choices(self) -> int:
        """Choices that are shown for each prompt."""
        return 1 if self.n is None else self.n


class CompletionRequest(GenerateRequest, frozen=True, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        Any,
        Meta(
            description="A text, a list of texts, a list of token ids or a list of such lists",
            extra_json_schema={
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}, "minItems": 1},
                    {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
                    {
                        "type": "array",
                        "minItems": 1,
                        "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
                    },
                ]
            },
        ),
    ]
    best_of: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None,
        Meta(description="Generate so many, show the n likeliest by mean log-probability"),
    ] = None


class ChatRequest(GenerateRequest, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Meta(description="The conversation so far")]
    tools: Annotated[list[dict[str, Any]] | None, Meta(description="Functions the model may call")] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None, Meta(description="none, auto, required (or any), or one function")
    ] = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="false: at most one call a reply")] = None
    functions: Annotated[list[dict[str, Any]] | None, Meta(description="Older form of tools")] = None
    function_call: Annotated[str | dict[str, Any] | None, Meta(description="Older form of tool_choice")] = (
        None
    )
    reasoning_history: Annotated[
        Literal["disabled", "interleaved", "preserved"] | None,
        Meta(description="disabled: earlier turns' reasoning is left out of the prompt"),
    ] = None
    prompt_truncate_len: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Drop the oldest turns (no system turn) until the prompt has at most so many tokens"
        ),
    ] = None
    safe_tokenization: Annotated[
        bool | None, Meta(description="Always on: what users write never becomes a control token")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="Variables for the model's chat template")
    ] = None
    add_generation_prompt: Annotated[
        bool | None, Meta(description="Begin the assistant's turn; default unless a message is continued")
    ] = None
    continue_final_message: Annotated[
        bool | None, Meta(description="Go on with the last message, which must be the assistant's")
    ] = None


def read_completion(body: bytes) -> CompletionRequest:
    """Decode and check a completions body. Raises RequestError."""
    fields = neutral.take_neutral(strict.loads(body), neutral.COMPLETION_FIELDS)
    request = strict.convert(fields, CompletionRequest)
    check(request)
    best_of = request.best_of
    if best_of is not None and best_of < request.choices:
        raise RequestError(f"'best_of' ({best_of}) must be at least 'n' ({request.choices})", param="best_of")
    if request.stream and best_of is not None and best_of > request.choices:
        raise RequestError(
            "'best_of' above 'n' can't be streamed: which choices are best is known at the end only",
            param="best_of",
        )
    return request


def read_chat(body: bytes) -> ChatRequest:
    """Decode and check a chat body. Raises RequestError."""
    fields = neutral.take_neutral(strict.loads(body), neutral.CHAT_FIELDS)
    request = strict.convert(fields, ChatRequest)
    check(request)
    return request


def check(request: GenerateRequest) -> None:
    """Check what no field can tell by itself. Raises RequestError."""
    if request.stream_options is not None and not request.stream:
        raise RequestError("'stream_options' is only allowed when 'stream' is true", param="stream_options")
    both = (request.max_tokens, request.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise RequestError(
            f"'max_tokens' ({both[0]}) and 'max_completion_tokens' ({both[1]}) differ: give one of them",
            param="max_completion_tokens",
        )
    # A client that fills in all fields sends 0 beside the default.
    alone = request.top_logprobs and request.logprobs is not True
    if alone or (request.top_logprobs == 0 and request.logprobs not in (None, False, True)):
        raise RequestError("'top_logprobs' needs 'logprobs' to be true", param="top_logprobs")
    if request.echo and request.echo_last is not None:
        raise RequestError("Give 'echo' or 'echo_last', not both", param="echo_last")
    if request.thinking is not None and request.reasoning_effort is not None:
        raise RequestError("Give 'thinking' or 'reasoning_effort', not both", param="thinking")
    if request.metadata is not None and len(request.metadata) > MAX_METADATA:
        raise RequestError(
            f"'metadata' may hold at most {MAX_METADATA} pairs; given: {len(request.metadata)}",
            param="metadata",
        )
    if isinstance(request, ChatRequest):
        _check_chat(request)


def _check_chat(request: ChatRequest) -> None:
    if request.token_limit == 0:
        name = "max_tokens" if request.max_tokens is not None else "max_completion_tokens"
        raise RequestError(f"'{name}' must be at least 1 for a chat; given: 0", param=name)
    if request.safe_tokenization is False:
        raise RequestError(
            "'safe_tokenization' can't be false: what users write never becomes a control token here; to "
            "write control tokens yourself, send the whole prompt to /v1/completions",
            param="safe_tokenization",
        )
    if request.continue_final_message and request.add_generation_prompt:
        raise RequestError(
            "'continue_final_message' goes on with the last message and 'add_generation_prompt' begins a new "
            "one: give one of them",
            param="continue_final_message",
        )
    if request.functions is not None and request.tools is not None:
        raise RequestError("Give 'tools' or 'functions', not both", param="functions")
    if request.function_call is not None and request.tool_choice is not None:
        raise RequestError("Give 'tool_choice' or 'function_call', not both", param="function_call")
