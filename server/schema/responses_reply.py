"""The replies of POST /v1/responses and the events of their streams."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from server.schema.responses_items import Status


class ResponseTopLogprob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One of the likeliest tokens at a position."""

    token: Annotated[str, Meta(description="The token's text")]
    bytes: Annotated[tuple[int, ...], Meta(description="Its bytes, which may be part of a character")]
    logprob: Annotated[float, Meta(description="Its log-probability")]


class ResponseLogprob(ResponseTopLogprob, frozen=True, kw_only=True, gc=False):
    """One token of the reply, with its log-probability and the likeliest at its place."""

    top_logprobs: Annotated[
        tuple[ResponseTopLogprob, ...], Meta(description="The likeliest tokens, best first")
    ] = ()


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """Text of a reply."""

    annotations: Annotated[tuple[()], Meta(description="Always empty: no tool here makes any")] = ()
    logprobs: Annotated[
        tuple[ResponseLogprob, ...], Meta(description="One entry a token, where asked for")
    ] = ()
    text: Annotated[str, Meta(description="The text")]


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Text that the model thought before it replied."""

    text: Annotated[str, Meta(description="The reasoning")]


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """What the model says."""

    id: Annotated[str, Meta(description="The item's id")]
    status: Annotated[Status, Meta(description="incomplete where max_output_tokens cut it")]
    role: Annotated[Literal["assistant"], Meta(description="Who says it")] = "assistant"
    content: Annotated[tuple[OutputText, ...], Meta(description="Its text, as one part")]


class OutputReasoning(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought."""

    id: Annotated[str, Meta(description="The item's id")]
    status: Annotated[Status, Meta(description="incomplete where max_output_tokens cut it")]
    summary: Annotated[tuple[()], Meta(description="Always empty: nothing is summarised")] = ()
    content: Annotated[tuple[ReasoningText, ...], Meta(description="The reasoning, as one part")]
    encrypted_content: Annotated[None, Meta(description="Always null: reasoning is given as text")] = None


class OutputCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call that the client is to run."""

    id: Annotated[str, Meta(description="The item's id")]
    status: Annotated[Status, Meta(description="incomplete where max_output_tokens cut it")]
    call_id: Annotated[str, Meta(description="Names the call in the function_call_output that answers it")]
    name: Annotated[str, Meta(description="The function to call")]
    arguments: Annotated[str, Meta(description="Its arguments, a JSON object as text")]


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputDetails(msgspec.Struct, frozen=True):
    """Of the input's tokens, what the cache did with them."""

    cached_tokens: Annotated[int, Meta(description="Tokens taken from the cache")]
    cache_write_tokens: Annotated[int, Meta(description="Tokens computed and newly stored in the cache")]


class OutputDetails(msgspec.Struct, frozen=True):
    """Of the output's tokens, what they were spent on."""

    reasoning_tokens: Annotated[int, Meta(description="Tokens of reasoning")]


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a whole request; cached ones are part of input_tokens."""

    input_tokens: Annotated[int, Meta(description="Tokens of the prompt")]
    input_tokens_details: Annotated[InputDetails, Meta(description="What the cache did with them")]
    output_tokens: Annotated[int, Meta(description="Tokens generated")]
    output_tokens_details: Annotated[OutputDetails, Meta(description="What they were spent on")]
    total_tokens: Annotated[int, Meta(description="Both together")]


class ResponseError(msgspec.Struct, frozen=True):
    """Why a response failed."""

    code: Annotated[str, Meta(description="Kind of failure")]
    message: Annotated[str, Meta(description="What happened")]


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why a response was cut."""

    reason: Annotated[Literal["max_output_tokens"], Meta(description="The only limit there is")] = (
        "max_output_tokens"
    )


class InputTokens(msgspec.Struct, frozen=True):
    """Body of POST /v1/responses/input_tokens: how many tokens the prompt has."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """A response, whole or as far as it has come. Fields of the request are repeated as they took effect."""

    id: Annotated[str, Meta(description="The reply's id; nothing is stored under it")]
    object: Annotated[Literal["response"], Meta(description="Kind of object")] = "response"
    created_at: Annotated[int, Meta(description="When the request came, in seconds of Unix time")]
    completed_at: Annotated[int | None, Meta(description="When it was complete, the same way")] = None
    status: Annotated[
        Literal["in_progress", "completed", "incomplete", "failed"], Meta(description="How far it has come")
    ]
    error: Annotated[ResponseError | None, Meta(description="Why it failed")] = None
    incomplete_details: Annotated[IncompleteDetails | None, Meta(description="Why it was cut")] = None
    model: Annotated[str, Meta(description="The model's name, as requested")]
    output: Annotated[
        tuple[OutputItem, ...], Meta(description="Reasoning, text and calls, in their order")
    ] = ()
    usage: Annotated[ResponseUsage | None, Meta(description="Tokens, once they are counted")] = None
    instructions: Annotated[str | None, Meta(description="As requested")] = None
    max_output_tokens: Annotated[int | None, Meta(description="As requested")] = None
    max_tool_calls: Annotated[int | None, Meta(description="As requested")] = None
    metadata: Annotated[dict[str, str], Meta(description="As requested")]
    parallel_tool_calls: Annotated[bool, Meta(description="Whether one reply may hold several calls")]
    temperature: Annotated[float, Meta(description="As requested, else the model's default")]
    top_p: Annotated[float, Meta(description="As requested, else the model's default")]
    top_logprobs: Annotated[int, Meta(description="As requested")]
    tools: Annotated[tuple[dict[str, Any], ...], Meta(description="As requested")]
    tool_choice: Annotated[str | dict[str, Any], Meta(description="As requested")]
    text: Annotated[dict[str, Any], Meta(description="As requested")]
    reasoning: Annotated[dict[str, Any], Meta(description="As requested")]
    truncation: Annotated[Literal["auto", "disabled"], Meta(description="As requested")]
    service_tier: Annotated[
        Literal["default", "priority"], Meta(description="The place that the request had in the queue")
    ]
    user: Annotated[str | None, Meta(description="As requested")] = None
    safety_identifier: Annotated[str | None, Meta(description="As requested")] = None
    prompt_cache_key: Annotated[str | None, Meta(description="As requested")] = None
    store: Annotated[bool, Meta(description="Always false: nothing is stored")] = False
    background: Annotated[bool, Meta(description="Always false")] = False
    previous_response_id: Annotated[None, Meta(description="Always null: nothing is stored")] = None
    system_fingerprint: Annotated[
        str | UnsetType, Meta(description="What the numbers were computed with; not in OpenAI's dialect")
    ] = UNSET


class StreamEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a stream. Which of the other fields it has depends on its type, as at OpenAI."""

    type: Annotated[str, Meta(description="Kind of event, which is its name in the stream, too")]
    sequence_number: Annotated[int, Meta(description="Counts the events from 0")] = 0
    response: Annotated[
        Response | UnsetType, Meta(description="Of created, in_progress, completed, incomplete and failed")
    ] = UNSET
    output_index: Annotated[int | UnsetType, Meta(description="The item's place in output")] = UNSET
    item: Annotated[
        OutputMessage | OutputReasoning | OutputCall | UnsetType,
        Meta(description="The item as it begins or has ended"),
    ] = UNSET
    item_id: Annotated[str | UnsetType, Meta(description="The item that a part or a delta belongs to")] = (
        UNSET
    )
    content_index: Annotated[int | UnsetType, Meta(description="The part's place in the item")] = UNSET
    part: Annotated[
        OutputText | ReasoningText | UnsetType, Meta(description="The part as it begins or has ended")
    ] = UNSET
    delta: Annotated[str | UnsetType, Meta(description="What is added to a text or to arguments")] = UNSET
    text: Annotated[str | UnsetType, Meta(description="A whole text, at its end")] = UNSET
    logprobs: Annotated[
        tuple[ResponseLogprob, ...] | UnsetType, Meta(description="Of a text's tokens, where asked for")
    ] = UNSET
    name: Annotated[str | UnsetType, Meta(description="The function, at the end of a call")] = UNSET
    arguments: Annotated[str | UnsetType, Meta(description="Whole arguments, at the end of a call")] = UNSET
