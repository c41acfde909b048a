"""The body of POST /v1/responses: OpenAI's second dialect, without state between requests.

A field that this server can't honour stays in the struct, so that it is refused in words and not as an
unknown one; its description begins with "Refused". What is taken without effect says "Accepted and ignored".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine import RequestError
from server.schema import strict
from server.schema.responses_items import INPUT_SCHEMA
from server.schema.responses_options import (
    CacheOptions,
    FunctionTool,
    Reasoning,
    ResponseStreamOptions,
    TextConfig,
    TextFormat,
    ToolChoice,
    check_choice,
    check_format,
    check_tools,
)

PRIORITY = ("priority",)
LOGPROBS = "message.output_text.logprobs"

Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"]
_NULL = {"type": "null"}


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/responses. None is the same as absent everywhere."""

    model: Annotated[str, Meta(description="Name of the model, as /v1/models lists it")]
    input: Annotated[
        Any,
        Meta(
            description="The user's text, or the conversation as a list of items",
            extra_json_schema={"anyOf": INPUT_SCHEMA},
        ),
    ]
    instructions: Annotated[str | None, Meta(description="System message that goes before the input")] = None
    max_output_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Most tokens generated, reasoning and calls included"),
    ] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0.0, le=2.0)] | None,
        Meta(description="Sampling temperature; 0 takes the likeliest token"),
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(ge=0.0, le=1.0)] | None,
        Meta(description="Share of probability that tokens are drawn from"),
    ] = None
    top_logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=20)] | None,
        Meta(description="Alternatives a token with their log-probabilities"),
    ] = None
    include: Annotated[
        list[Includable] | None,
        Meta(
            description="More to put in the reply: log-probabilities of its text; the other names are"
            " accepted and ignored, since nothing here has them"
        ),
    ] = None
    stream: Annotated[bool | None, Meta(description="Whether the reply comes as events")] = None
    stream_options: Annotated[
        ResponseStreamOptions | None, Meta(description="How the events look; only with stream")
    ] = None
    tools: Annotated[
        list[FunctionTool] | None,
        Meta(description="Functions that the model may call; built-in tools are refused"),
    ] = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ToolChoice | None,
        Meta(description="Whether and which tools are called"),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Meta(description="Whether one reply may hold several calls")
    ] = None
    max_tool_calls: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Accepted and ignored: it counts built-in tools only"),
    ] = None
    text: Annotated[TextConfig | None, Meta(description="What the reply's text must be")] = None
    reasoning: Annotated[Reasoning | None, Meta(description="How much the model reasons")] = None
    metadata: Annotated[
        Metadata | None, Meta(description="Up to 16 pairs of text, repeated in the reply")
    ] = None
    user: Annotated[
        str | None, Meta(description="Affinity key of the client's user, if there is no prompt_cache_key")
    ] = None
    safety_identifier: Annotated[
        str | None, Meta(description="Accepted and ignored; repeated in the reply")
    ] = None
    prompt_cache_key: Annotated[
        str | None, Meta(description="Affinity key: requests with the same one are kept together")
    ] = None
    prompt_cache_retention: Annotated[
        Literal["in_memory", "in-memory", "24h"] | None,
        Meta(description="Accepted and ignored: prompts are kept as long as there is room"),
    ] = None
    prompt_cache_options: Annotated[
        CacheOptions | None, Meta(description="Accepted and ignored: every prompt is cached, to the token")
    ] = None
    prompt_cache_isolation_key: Annotated[
        str | None, Meta(description="Requests with different keys share no cached prompt")
    ] = None
    cache_salt: Annotated[str | None, Meta(description="The same as prompt_cache_isolation_key")] = None
    prompt_cache_max_len: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="Most tokens of the prompt taken from the cache; 0 takes none"),
    ] = None
    service_tier: Annotated[
        ServiceTier | None,
        Meta(description="priority and fast go first in the queue; others are the default"),
    ] = None
    store: Annotated[
        bool | None,
        Meta(description="Accepted and ignored: nothing is stored, and the reply says store false"),
    ] = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None,
        Meta(description="auto drops the oldest turns of an input that does not fit; else that is a 400"),
    ] = None
    previous_response_id: Annotated[
        Any, Meta(description="Refused unless null: no response is stored", extra_json_schema=_NULL)
    ] = None
    conversation: Annotated[
        Any, Meta(description="Refused unless null: no conversation is stored", extra_json_schema=_NULL)
    ] = None
    background: Annotated[
        Any,
        Meta(
            description="Refused unless false: replies go to a client that waits",
            extra_json_schema={"enum": [False, None]},
        ),
    ] = None
    background_options: Annotated[Any, Meta(description="Refused unless null", extra_json_schema=_NULL)] = (
        None
    )
    prompt: Annotated[
        Any, Meta(description="Refused unless null: no prompt is stored", extra_json_schema=_NULL)
    ] = None
    context_management: Annotated[
        Any,
        Meta(
            description="Refused unless null or empty: nothing is compacted",
            extra_json_schema={"enum": [[], None]},
        ),
    ] = None
    moderation: Annotated[
        Any, Meta(description="Refused unless null: there is no moderation model", extra_json_schema=_NULL)
    ] = None
    access_programs: Annotated[Any, Meta(description="Refused unless null", extra_json_schema=_NULL)] = None
    image: Annotated[
        Any, Meta(description="Refused unless null: models here read text only", extra_json_schema=_NULL)
    ] = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are asked for, by their name or by a number of alternatives."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)


_AGAIN = "nothing is stored between requests; send the earlier items again in 'input'"
# Fields that ask for what isn't here, and what is said about each.
_REFUSED = {
    "previous_response_id": _AGAIN,
    "conversation": _AGAIN,
    "background": "a reply is only made for a client that waits for it",
    "background_options": "a reply is only made for a client that waits for it",
    "prompt": "there are no stored prompts; send the text in 'instructions' and 'input'",
    "context_management": "this server compacts nothing; 'truncation' \"auto\" drops the oldest turns",
    "moderation": "there is no moderation model",
    "access_programs": "there are no access programs",
    "image": "models here read text only",
}
_NESTED: dict[str, type[msgspec.Struct]] = {
    "text": TextConfig,
    "reasoning": Reasoning,
    "stream_options": ResponseStreamOptions,
    "prompt_cache_options": CacheOptions,
}


def read_request(fields: dict[str, Any]) -> ResponsesRequest:
    """Check the fields of a body, but for the items of its input. Raises RequestError."""
    _refuse(fields)
    for name, struct in _NESTED.items():
        if isinstance(value := fields.get(name), dict):
            if name == "text" and isinstance(value.get("format"), dict):
                strict.convert(value["format"], TextFormat, at="text.format.")
            strict.convert(value, struct, at=f"{name}.")
    check_tools(fields.get("tools"))
    check_choice(fields.get("tool_choice"))
    request = strict.convert(fields, ResponsesRequest)
    check_format(request.text.format if request.text else None)
    _check_names(request)
    if request.stream_options is not None and not request.stream:
        raise RequestError("'stream_options' is only allowed when 'stream' is true", param="stream_options")
    return request


def _refuse(fields: dict[str, Any]) -> None:
    for name, words in _REFUSED.items():
        value = fields.get(name)
        neutral = {"background": value is False, "context_management": value == []}
        if value is not None and not neutral.get(name):
            raise RequestError(f"'{name}' is not supported by this server: {words}", param=name)


def _check_names(request: ResponsesRequest) -> None:
    names: set[str] = set()
    for i, tool in enumerate(request.tools or ()):
        if tool.name in names:
            raise RequestError(
                f"'tools.{i}.name' {strict.shown(tool.name)} is given to two tools", param=f"tools.{i}.name"
            )
        names.add(tool.name)
    choice = request.tool_choice
    if isinstance(choice, ToolChoice):
        wanted = [("name", choice.name)] if choice.name is not None else []
        wanted += [(f"tools.{i}.name", tool.name) for i, tool in enumerate(choice.tools or ())]
        for at, found in wanted:
            if found not in names:
                raise RequestError(
                    f"'tool_choice.{at}' {strict.shown(found)} is none of the 'tools'",
                    param=f"tool_choice.{at}",
                )
        if choice.tools == []:
            raise RequestError("'tool_choice.tools' is empty", param="tool_choice.tools")
