"""Splits a reply, as it is generated, into content, reasoning and calls of tools."""

from __future__ import annotations

from typing import Protocol

from engine.text.call_formats import CallFormat
from engine.text.reply_calls import CallParser, style_of
from engine.text.reply_parts import Part
from engine.text.reply_reasoning import ReasoningSplitter, Thinking

__all__ = ["Part", "ReplyParser", "make_parser", "markers"]


class ReplyParser(Protocol):
    """Takes a reply's text piece by piece.

    However the text is cut, the parts joined are the same, and no text is lost but markers, the JSON around
    calls' arguments, and white space around both.
    """

    def push(self, text: str) -> list[Part]:
        """Take more text; return what is certain now, often nothing."""

    def finish(self) -> list[Part]:
        """End the reply, complete or cut off; return the rest."""


def make_parser(
    family: CallFormat, thinking: Thinking | None, *, tools: bool, opened: str = ""
) -> ReplyParser:
    """A parser for one reply of a model.

    Calls are looked for only where the request has `tools`, reasoning only with a model's `thinking`;
    `opened` is what the prompt has begun of it.
    """
    calls: ReplyParser = CallParser(style_of(family)) if tools else _Content()
    return _Both(ReasoningSplitter(thinking, opened), calls) if thinking else calls


def markers(family: CallFormat, thinking: Thinking | None, *, tools: bool) -> tuple[str, ...]:
    """Spellings that such a parser must see in the text, where a model has control tokens for them."""
    calls = style_of(family).markers if tools else ()
    return (*calls, thinking.opening, thinking.closing) if thinking else calls


class _Content:
    """Takes everything for content."""

    def push(self, text: str) -> list[Part]:
        return [Part("content", text)] if text else []

    def finish(self) -> list[Part]:
        return []


class _Both:
    """Reasoning first, then calls in what is left."""

    def __init__(self, reasoning: ReasoningSplitter, calls: ReplyParser) -> None:
        self._reasoning, self._calls = reasoning, calls

    def push(self, text: str) -> list[Part]:
        return self._pass_on(self._reasoning.push(text))

    def finish(self) -> list[Part]:
        return [*self._pass_on(self._reasoning.finish()), *self._calls.finish()]

    def _pass_on(self, parts: list[Part]) -> list[Part]:
        found: list[Part] = []
        for part in parts:
            found.extend(self._calls.push(part.text) if part.kind == "content" else [part])
        return found
