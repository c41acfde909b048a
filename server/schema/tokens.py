"""Bodies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from engine import RequestError
from server.schema import strict
from server.schema.requests import ChatRequest, check

# What steers the rendering of a chat, and so has no meaning for a plain text; and the other way round.
_OF_MESSAGES = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
_OF_PROMPT = ("add_special_tokens",)


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /tokenize: a text, or a chat as /v1/chat/completions takes it."""

    model: Annotated[str, Meta(description="A served model; without it the one that is served")] | None = None
    prompt: (
        Annotated[str, Meta(description="Text to tokenize as /v1/completions does; excludes 'messages'")]
        | None
    ) = None
    messages: (
        Annotated[
            list[dict[str, Any]],
            Meta(description="Chat to render and tokenize; excludes 'prompt'"),
        ]
        | None
    ) = None
    tools: Annotated[list[dict[str, Any]], Meta(description="Tools of the chat")] | None = None
    add_generation_prompt: (
        Annotated[bool, Meta(description="Whether the assistant's turn is opened; true by default")] | None
    ) = None
    continue_final_message: (
        Annotated[bool, Meta(description="Whether the last message, the assistant's, is gone on with")] | None
    ) = None
    chat_template_kwargs: (
        Annotated[dict[str, Any], Meta(description="Variables for the chat template")] | None
    ) = None
    add_special_tokens: (
        Annotated[
            bool,
            Meta(description="Whether BOS is put before the prompt where the model has one; true by default"),
        ]
        | None
    ) = None
    return_token_strs: (
        Annotated[bool, Meta(description="Whether each token's text is returned too")] | None
    ) = None

    def chat(self) -> ChatRequest:
        """The chat whose prompt is asked for."""
        return ChatRequest(
            model=self.model or "",
            messages=self.messages or [],
            tools=self.tools,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
        )


class TokenizeReply(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a prompt, the very ones that a request with it would run."""

    tokens: Annotated[tuple[int, ...], Meta(description="Token ids")]
    count: Annotated[int, Meta(ge=0, description="Number of tokens")]
    max_model_len: Annotated[int, Meta(ge=1, description="Tokens that prompt and reply may have together")]
    token_strs: (
        Annotated[tuple[str, ...], Meta(description="Each token's text; U+FFFD where it is no character")]
        | UnsetType
    ) = UNSET


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /detokenize."""

    model: Annotated[str, Meta(description="A served model; without it the one that is served")] | None = None
    tokens: Annotated[list[Any], Meta(description="Token ids; control tokens give their spelling")]


class DetokenizeReply(msgspec.Struct, frozen=True, kw_only=True):
    """The text that token ids stand for."""

    prompt: Annotated[str, Meta(description="Text; U+FFFD for bytes that are no whole character")]


def read_tokenize(body: bytes) -> TokenizeRequest:
    """Decode and check a body of /tokenize. Raises RequestError."""
    request = strict.convert(strict.loads(body), TokenizeRequest)
    if (request.prompt is None) == (request.messages is None):
        found = "both" if request.prompt is not None else "none"
        raise RequestError(f"Give one of 'prompt' and 'messages'; given: {found}", param="prompt")
    wrong, of = (_OF_MESSAGES, "messages") if request.messages is None else (_OF_PROMPT, "prompt")
    for name in wrong:
        if getattr(request, name) is not None:
            raise RequestError(f"'{name}' is only allowed with '{of}'", param=name)
    if request.messages is not None:
        check(request.chat())
    return request


def read_detokenize(body: bytes) -> DetokenizeRequest:
    """Decode a body of /detokenize; its ids are not checked yet. Raises RequestError."""
    return strict.convert(strict.loads(body), DetokenizeRequest)
