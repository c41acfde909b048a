"""Thinking models: how they mark their reasoning, and its separation from the rest of a reply."""

from __future__ import annotations

from typing import NamedTuple

from engine.text.reply_parts import BLANKS, MOST_BLANKS, Part, Parts, begun, trimmed
from engine.text.template import ChatTemplate


class Thinking(NamedTuple):
    """The markers around a model's reasoning.

    `implicit`: the template names the closing one alone, as of models that reason at the beginning of every
    reply and may leave out the opening one.
    """

    opening: str
    closing: str
    implicit: bool


_MARKERS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


def detect(template: ChatTemplate | None) -> Thinking | None:
    """How a model marks its reasoning, or None where its template knows no thinking."""
    source = template.source if template else ""
    for opening, closing in _MARKERS:
        if opening in source or closing in source:
            return Thinking(opening, closing, opening not in source)
    return None


def last_marker(thinking: Thinking, end: str, whole_turn: bool) -> str:
    """The end of a prompt from its last marker of reasoning on; "" where it has none.

    `end` is the end of the prompt's text; `whole_turn` says that it begins in the last turn. Where it may
    hold earlier turns too, only a marker at its very end counts.
    """
    markers = (thinking.opening, thinking.closing)
    at = max(map(end.rfind, markers))
    return end[at:] if at >= 0 and (whole_turn or end.rstrip(BLANKS).endswith(markers)) else ""


class ReasoningSplitter:
    """Splits text into reasoning and content. The joined parts do not depend on how the text is cut.

    Reasoning stands at the beginning of a reply, up to its closing marker; markers elsewhere are content.
    `opened` is what the prompt has begun already: behind an opening marker the reply goes on with reasoning,
    behind a closing one there is none. White space around the reasoning and just behind its closing marker
    is dropped.
    """

    def __init__(self, thinking: Thinking, opened: str = "") -> None:
        self._opening, self._closing = thinking.opening, thinking.closing
        opening, closing = opened.rfind(self._opening), opened.rfind(self._closing)
        self._within = opening > closing or (opening == closing and thinking.implicit)
        self._parts = Parts()
        self._held = ""
        self._state = self._start
        if closing > opening:
            self._state = self._content
        elif opening >= 0 and opened[opening + len(self._opening) :].strip(BLANKS):
            self._state = self._reasoning

    def push(self, text: str) -> list[Part]:
        """Take more text; return what is certain now."""
        self._held += text
        while self._held and self._state():
            pass
        return self._parts.take()

    def finish(self) -> list[Part]:
        """End the reply: return what was held back."""
        thought = self._state == self._reasoning or (self._state == self._start and self._within)
        self._parts.add("reasoning" if thought else "content", self._held)
        self._held = ""
        return self._parts.take()

    # Each state takes what it can from the held text and returns whether another should go on with the rest.

    def _start(self) -> bool:
        text = self._held.lstrip(BLANKS)
        blanks = 0 if self._within else len(self._held) - len(text)
        if text.startswith(self._opening) and blanks <= MOST_BLANKS:
            self._held, self._within = text[len(self._opening) :], True
            self._state = self._blank
            return True
        if self._within:
            self._held = text
        if self._opening.startswith(text) and blanks <= MOST_BLANKS:
            return False
        self._state = self._reasoning if self._within else self._content
        return True

    def _blank(self) -> bool:
        """Between a marker and the text behind it."""
        self._held = self._held.lstrip(BLANKS)
        if self._held:
            self._state = self._reasoning if self._within else self._content
        return True

    def _reasoning(self) -> bool:
        text = self._held
        end = text.find(self._closing)
        if end < 0:
            certain = trimmed(text, len(text) - begun(text, self._closing))
            self._parts.add("reasoning", text[:certain])
            self._held = text[certain:]
            return False
        self._parts.add("reasoning", text[: trimmed(text, end)])
        self._held, self._within = text[end + len(self._closing) :], False
        self._state = self._blank
        return True

    def _content(self) -> bool:
        self._parts.add("content", self._held)
        self._held = ""
        return False
