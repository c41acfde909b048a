"""The items of a conversation at /v1/responses, and the chat turns that they are.

An assistant's turn comes apart into items there (reasoning, text, one item a call), so neighbouring items
are put together again: sent back, a reply gives the tokens that it was made of, as far as the model's chat
template does.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine import RequestError
from server.schema import strict

Status = Literal["in_progress", "completed", "incomplete"]
_IGNORED = "Accepted and ignored"


class MessageItem(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody said. An item without a type is one, too."""

    type: Annotated[Literal["message"] | None, Meta(description="Kind of item; may be left out here")] = None
    role: Annotated[
        Literal["user", "assistant", "system", "developer"],
        Meta(description="Who said it; developer is the same as system"),
    ]
    content: Annotated[
        str | list[dict[str, Any]], Meta(description="The text, or a list of parts that hold it")
    ]
    id: Annotated[str | None, Meta(description=_IGNORED)] = None
    status: Annotated[Status | None, Meta(description=_IGNORED)] = None
    phase: Annotated[Literal["commentary", "final_answer"] | None, Meta(description=_IGNORED)] = None


class InputText(msgspec.Struct, frozen=True, kw_only=True):
    """Text for the model to read."""

    type: Annotated[Literal["input_text"], Meta(description="Kind of part")]
    text: Annotated[str, Meta(description="The text")]
    prompt_cache_breakpoint: Annotated[
        dict[str, Any] | None, Meta(description=f"{_IGNORED}: every prompt is cached, to the token")
    ] = None


class SaidText(msgspec.Struct, frozen=True, kw_only=True):
    """Text of an earlier reply."""

    type: Annotated[Literal["output_text"], Meta(description="Kind of part")]
    text: Annotated[str, Meta(description="The text")]
    annotations: Annotated[list[Any] | None, Meta(description=_IGNORED)] = None
    logprobs: Annotated[list[Any] | None, Meta(description=_IGNORED)] = None
    parsed: Annotated[Any, Meta(description=f"{_IGNORED}: clients keep the parsed text here")] = None


class SaidRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """An earlier reply that another server marked as a refusal."""

    type: Annotated[Literal["refusal"], Meta(description="Kind of part")]
    refusal: Annotated[str, Meta(description="Its text")]


class CallItem(msgspec.Struct, frozen=True, kw_only=True):
    """A call that an earlier reply made."""

    type: Annotated[Literal["function_call"], Meta(description="Kind of item")]
    call_id: Annotated[str, Meta(min_length=1, description="Names the call for its output")]
    name: Annotated[str, Meta(min_length=1, description="The function's name")]
    arguments: Annotated[str, Meta(description="Its arguments, a JSON object as text")]
    id: Annotated[str | None, Meta(description=_IGNORED)] = None
    status: Annotated[Status | None, Meta(description=_IGNORED)] = None
    namespace: Annotated[str | None, Meta(description=_IGNORED)] = None
    caller: Annotated[dict[str, Any] | None, Meta(description=_IGNORED)] = None
    run_async: Annotated[bool | None, Meta(description=_IGNORED)] = msgspec.field(name="async", default=None)


class CallOutputItem(msgspec.Struct, frozen=True, kw_only=True):
    """What a function gave back."""

    type: Annotated[Literal["function_call_output"], Meta(description="Kind of item")]
    call_id: Annotated[str, Meta(description="The call that it answers")]
    output: Annotated[
        str | list[dict[str, Any]], Meta(description="The result as text, or as a list of input_text parts")
    ]
    name: Annotated[str | None, Meta(description=_IGNORED)] = None
    id: Annotated[str | None, Meta(description=_IGNORED)] = None
    status: Annotated[Status | None, Meta(description=_IGNORED)] = None
    namespace: Annotated[str | None, Meta(description=_IGNORED)] = None
    caller: Annotated[dict[str, Any] | None, Meta(description=_IGNORED)] = None
    created_by: Annotated[str | None, Meta(description=_IGNORED)] = None


class SaidReasoning(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of reasoning."""

    type: Annotated[Literal["reasoning_text"], Meta(description="Kind of part")]
    text: Annotated[str, Meta(description="The reasoning")]


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True):
    """What an earlier reply thought. The model's template says whether the model sees it again."""

    type: Annotated[Literal["reasoning"], Meta(description="Kind of item")]
    id: Annotated[str | None, Meta(description=_IGNORED)] = None
    content: Annotated[
        list[dict[str, Any]] | None, Meta(description="The reasoning, as a list of reasoning_text parts")
    ] = None
    summary: Annotated[list[Any] | None, Meta(description=_IGNORED)] = None
    encrypted_content: Annotated[
        str | None, Meta(description=f"{_IGNORED}: only the server that made it can read it")
    ] = None
    status: Annotated[Status | None, Meta(description=_IGNORED)] = None


ITEMS: dict[str, type[msgspec.Struct]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
}
# The forms of `input`, for the document: enough to write a valid one, leaving out what is ignored.
_STRING = {"type": "string"}


def _object(required: str, **properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def _parts(kind: str) -> dict[str, Any]:
    part = _object("type text", type={"const": kind}, text=_STRING)
    return {"anyOf": [_STRING, {"type": "array", "items": part}]}


INPUT_SCHEMA: list[dict[str, Any]] = [
    _STRING,
    {
        "type": "array",
        "minItems": 1,
        "items": {
            "anyOf": [
                _object(
                    "role content",
                    type={"const": "message"},
                    role={"enum": ["user", "system", "developer"]},
                    content=_parts("input_text"),
                ),
                _object(
                    "role content",
                    type={"const": "message"},
                    role={"const": "assistant"},
                    content=_parts("output_text"),
                ),
                _object(
                    "type call_id name arguments",
                    type={"const": "function_call"},
                    call_id={"type": "string", "minLength": 1},
                    name={"type": "string", "minLength": 1},
                    arguments={"type": "string", "contentMediaType": "application/json"},
                ),
                _object(
                    "type call_id output",
                    type={"const": "function_call_output"},
                    call_id=_STRING,
                    output=_parts("input_text"),
                ),
                _object(
                    "type",
                    type={"const": "reasoning"},
                    content={
                        "type": "array",
                        "items": _object("type text", type={"const": "reasoning_text"}, text=_STRING),
                    },
                ),
            ]
        },
    },
]
_INPUT_PARTS: dict[str, type[msgspec.Struct]] = {"input_text": InputText}
_OUTPUT_PARTS: dict[str, type[msgspec.Struct]] = {"output_text": SaidText, "refusal": SaidRefusal}
_REASONING_PARTS: dict[str, type[msgspec.Struct]] = {"reasoning_text": SaidReasoning}


def read_turns(given: Any, instructions: str | None) -> list[dict[str, Any]]:
    """Turn a request's input into the messages of a chat, with `instructions` as a system message in front.

    Raises RequestError that names the item at fault.
    """
    turns: list[dict[str, Any]] = []
    if instructions is not None:
        turns.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*turns, {"role": "user", "content": given}]
    if not isinstance(given, list):
        raise RequestError(
            f"'input' must be a text or a list of items; given: {strict.shown(given)}", param="input"
        )
    if not given:
        raise RequestError("'input' must hold at least one item", param="input")
    history = _History(turns)
    for i, fields in enumerate(given):
        if not isinstance(fields, dict):
            raise RequestError(
                f"'input.{i}' must be an object; given: {strict.shown(fields)}", param=f"input.{i}"
            )
        history.add(f"input.{i}.", fields)
    if not turns:
        raise RequestError("'input' holds nothing that the model can read", param="input")
    for turn in turns:
        # Reasoning or calls alone: there was no text.
        turn.setdefault("content", "")
    return turns


class _History:
    """Puts items together to turns. `_open` is the assistant's turn that the next item may belong to."""

    def __init__(self, turns: list[dict[str, Any]]) -> None:
        self.turns = turns
        self._open: dict[str, Any] | None = None
        self._calls: set[str] = set()

    def add(self, at: str, fields: dict[str, Any]) -> None:
        item = _read_item(at, fields)
        if isinstance(item, ReasoningItem):
            self._think(at, item)
        elif isinstance(item, CallItem):
            self._call(at, item)
        elif isinstance(item, CallOutputItem):
            self._answer(at, item)
        elif isinstance(item, MessageItem):
            self._say(at, item)

    def _think(self, at: str, item: ReasoningItem) -> None:
        text = _text(f"{at}content", item.content or [], _REASONING_PARTS)
        if self._open is not None and ("content" in self._open or "tool_calls" in self._open):
            self._open = None
        if text:
            turn = self._assistant()
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def _say(self, at: str, item: MessageItem) -> None:
        said = item.role == "assistant"
        text = _text(f"{at}content", item.content, _OUTPUT_PARTS if said else _INPUT_PARTS)
        if not said:
            self._open = None
            self.turns.append({"role": item.role, "content": text})
            return
        turn = self._assistant()
        # Text that follows unanswered calls belongs to them: their outputs must come next.
        if "content" in turn and "tool_calls" not in turn:
            turn = self._begin()
        turn["content"] = turn.get("content", "") + text

    def _call(self, at: str, item: CallItem) -> None:
        if item.call_id in self._calls:
            raise RequestError(
                f"'{at}call_id' {strict.shown(item.call_id)} is given to two calls", param=at + "call_id"
            )
        self._calls.add(item.call_id)
        _check_arguments(f"{at}arguments", item.arguments)
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        self._assistant().setdefault("tool_calls", []).append(call)

    def _answer(self, at: str, item: CallOutputItem) -> None:
        if item.call_id not in self._calls:
            raise RequestError(
                f"'{at}call_id' {strict.shown(item.call_id)} answers no function_call before it",
                param=at + "call_id",
            )
        self._open = None
        text = _text(f"{at}output", item.output, _INPUT_PARTS)
        self.turns.append({"role": "tool", "tool_call_id": item.call_id, "content": text})

    def _assistant(self) -> dict[str, Any]:
        return self._begin() if self._open is None else self._open

    def _begin(self) -> dict[str, Any]:
        self._open = {"role": "assistant"}
        self.turns.append(self._open)
        return self._open


def _read_item(at: str, fields: dict[str, Any]) -> msgspec.Struct:
    kind = fields.get("type")
    if kind is None:
        # The two kinds that may leave it out.
        kind = "item_reference" if "id" in fields and "role" not in fields else "message"
    if kind == "item_reference":
        raise RequestError(
            f"'{at}type' \"item_reference\" is not supported by this server: nothing is stored; "
            "send the item itself",
            param=at + "type",
        )
    return strict.convert(fields, _known(f"{at}type", kind, ITEMS), at=at)


def _text(at: str, content: str | list[dict[str, Any]], parts: dict[str, type[msgspec.Struct]]) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for i, fields in enumerate(content):
        struct = _known(f"{at}.{i}.type", fields.get("type"), parts)
        part = strict.convert(fields, struct, at=f"{at}.{i}.")
        texts.append(part.refusal if isinstance(part, SaidRefusal) else getattr(part, "text"))  # noqa: B009
    return "".join(texts)


def _known(at: str, kind: Any, structs: dict[str, type[msgspec.Struct]]) -> type[msgspec.Struct]:
    if not isinstance(kind, str) or kind not in structs:
        raise RequestError(
            f"'{at}' {strict.shown(kind)} is not supported here by this server, which reads text only: "
            f"{', '.join(structs)}",
            param=at,
        )
    return structs[kind]


def _check_arguments(at: str, arguments: str) -> None:
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as exc:
        raise RequestError(f"'{at}' is not valid JSON: {exc}", param=at) from None
    if not isinstance(value, dict):
        raise RequestError(
            f"'{at}' must be a JSON object as text; given: {strict.shown(arguments)}", param=at
        )
