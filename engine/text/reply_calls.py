"""Finds calls of tools in a reply that comes in pieces, for the families of engine.text.call_formats.

White space just before a call's opening marker and after a call is dropped, and so is the punctuation that
stands between and after calls; everything else that is no call is content, exactly as written.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from engine.text.call_formats import HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED, CallFormat
from engine.text.reply_json import CallReader
from engine.text.reply_parts import BLANKS, MOST_BLANKS, Part, Parts, begun, trimmed


class Style(NamedTuple):
    """How a family's calls are found.

    Calls follow the marker `opening`, in a list or not where `listed`; they end with `closing` unless it is
    empty. `bare`: an object at the very beginning of a reply may be a call too. `named`: a call may be
    written as a bare name and its arguments. `skipped` may stand between and after calls.
    """

    opening: str
    closing: str
    skipped: str
    bare: bool = False
    listed: bool = False
    named: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Every marker the parser looks for, as a model may have a control token for it."""
        named = (_ARGUMENTS, _CALL_ID) if self.named else ()
        return tuple(marker for marker in (self.opening, self.closing, *named) if marker)


_ARGUMENTS, _CALL_ID = "[ARGS]", "[CALL_ID]"
_HERMES = Style("<tool_call>", "</tool_call>", BLANKS + ",}")
_LLAMA3 = Style("<|python_tag|>", "", BLANKS + ";,}", bare=True)
_MISTRAL = Style("[TOOL_CALLS]", "", BLANKS + ",}]", listed=True, named=True)
_STYLES = {
    HERMES.name: _HERMES,
    LLAMA3.name: _LLAMA3,
    MISTRAL.name: _MISTRAL,
    MISTRAL_NAMED.name: _MISTRAL,
}

# What may stand between [TOOL_CALLS] and the arguments' object: a name, and perhaps the call's id.
_HEAD = re.compile(
    r"(?P<name>[\w.:/-]+)[ \t\r\n]*"
    r"(?:\[CALL_ID\][ \t\r\n]*[\w-]+[ \t\r\n]*)?(?P<marked>\[ARGS\][ \t\r\n]*)?"
)
_LONGEST_HEAD = 300


def style_of(family: CallFormat) -> Style:
    """How calls of a format are found."""
    return _STYLES[family.name]


class CallParser:
    """Splits text into content and calls. The joined parts do not depend on how the text is cut.

    What only looks like a call stays content: another shape, broken JSON, or an end before the name is
    whole. A call cut off after that is given as far as it came. Arguments that turn out to be broken when
    they are being given already go on, as written, up to the closing marker or the next opening one.

    Names are given as the model made them, also of tools that the request does not have: only the client can
    tell a slip from a call that it would rather answer with an error.
    """

    def __init__(self, style: Style) -> None:
        self._style = style
        self._parts = Parts()
        self._held = ""  # text that is not decided on: in an attempt all since its beginning
        self._at = 0  # how far the attempt has read in it
        self._mark = 0  # where the text behind the opening marker begins in it
        self._state = self._start if style.bare else self._content
        self._listed = False
        self._reader: CallReader | None = None
        self._calls = 0

    def push(self, text: str) -> list[Part]:
        """Take more text; return what is certain now."""
        self._held += text
        while self._held and self._state():
            pass
        return self._parts.take()

    def finish(self) -> list[Part]:
        """End the reply: return what was held back."""
        if self._state == self._head:
            self._end_head()
        if self._reader is not None and self._reader.end():
            self._give()
        elif self._state == self._broken:
            self._parts.add("call", self._held, self._calls - 1)
        elif self._state not in (self._after, self._tail):
            # Behind a call there can only be the beginning of its closing marker.
            self._parts.add("content", self._held)
        self._held, self._reader = "", None
        return self._parts.take()

    # Each state takes what it can from the held text and returns whether another should go on with the rest.

    def _start(self) -> bool:
        """At the beginning of a reply in which a bare object may be a call."""
        text = self._held.lstrip(BLANKS)
        blanks = len(self._held) - len(text)
        if not text and blanks <= MOST_BLANKS:
            return False
        if text[:1] == "{" and blanks <= MOST_BLANKS:
            return self._attempt(blanks, CallReader(needs_arguments=True))
        self._state = self._content
        return True

    def _content(self) -> bool:
        text, opening = self._held, self._style.opening
        found = text.find(opening)
        if found < 0:
            # White space may stand before a marker that is still to come.
            certain = trimmed(text, len(text) - begun(text, opening))
            self._parts.add("content", text[:certain])
            self._held = text[certain:]
            return False
        before = trimmed(text, found)
        self._parts.add("content", text[:before])
        self._held = text[before:]
        self._mark = self._at = found - before + len(opening)
        self._listed = False
        self._state = self._opened
        return True

    def _opened(self) -> bool:
        """Behind an opening marker."""
        while self._at < len(self._held):
            char = self._held[self._at]
            if char == "{":
                return self._attempt(self._mark, CallReader())
            if char == "[" and self._style.listed and not self._listed:
                self._listed = True
            elif char not in BLANKS:
                if not self._style.named or self._listed:
                    return self._fail()
                self._state = self._head
                return True
            self._at += 1
        return False

    def _head(self) -> bool:
        """In what may be a name, written without an object around it."""
        head, brace, _ = self._held[self._at : self._at + _LONGEST_HEAD].partition("{")
        if not brace:
            return len(head) == _LONGEST_HEAD and self._fail()
        found = _HEAD.fullmatch(head)
        if found is None:
            return self._fail()
        self._at += len(head)
        return self._attempt(self._mark, CallReader(name=found["name"]))

    def _call(self) -> bool:
        """In an object that may be a call, or is one that is being given."""
        reader = self._reader
        assert reader is not None
        self._at = reader.feed(self._held, self._at)
        if reader.announced:
            self._give()
            self._held, self._at = self._held[self._at :], 0
        elif reader.failed:
            return self._fail()
        if not reader.done and not reader.failed:
            return False
        self._reader = None
        self._state = self._broken if reader.broken else self._tail
        return True

    def _tail(self) -> bool:
        """Behind a call, where its closing marker or another call may follow."""
        closing = self._style.closing
        self._held = self._held.lstrip(self._style.skipped)
        if self._held.startswith("{"):
            return self._attempt(0, CallReader(needs_arguments=self._style.bare))
        if closing and self._held.startswith(closing):
            self._held = self._held[len(closing) :]
            self._state = self._after
        elif closing and closing.startswith(self._held):
            return False
        elif self._held:
            self._state = self._content
        return True

    def _after(self) -> bool:
        """Behind a closing marker."""
        self._held = self._held.lstrip(BLANKS)
        if self._held:
            self._state = self._content
        return True

    def _broken(self) -> bool:
        """In arguments that are no JSON: where they end is known by markers alone."""
        text, opening, closing = self._held, self._style.opening, self._style.closing
        places = [(at, marker) for marker in (opening, closing) if marker and (at := text.find(marker)) >= 0]
        if not places:
            held = max(begun(text, marker) for marker in (opening, closing) if marker)
            certain = len(text) - held
            if closing:
                # The end of the object around the arguments is no part of them.
                certain = trimmed(text, certain, BLANKS + "}")
            self._parts.add("call", text[:certain], self._calls - 1)
            self._held = text[certain:]
            return False
        end, marker = min(places)
        kept = trimmed(text, end, BLANKS + "}") if marker == closing else end
        around = text[kept:end].rstrip(BLANKS).removesuffix("}").rstrip(BLANKS)
        self._parts.add("call", text[:kept] + around, self._calls - 1)
        self._held = text[end:] if marker == opening else text[end + len(closing) :]
        self._state = self._content if marker == opening else self._after
        return True

    def _attempt(self, mark: int, reader: CallReader) -> bool:
        self._at = max(self._at, mark)
        self._mark, self._reader, self._state = mark, reader, self._call
        return True

    def _fail(self) -> bool:
        """This is no call: show it, and look for another behind the marker, or the brace, it began with."""
        end = max(self._mark, 1)
        self._parts.add("content", self._held[:end])
        self._held, self._at, self._reader = self._held[end:], 0, None
        self._state = self._content
        return True

    def _give(self) -> None:
        """Give what there is of the call that is being read."""
        assert self._reader is not None
        if self._mark >= 0:
            self._mark = -1
            self._calls += 1
            self._parts.add("call", self._reader.take(), self._calls - 1, self._reader.name)
        else:
            self._parts.add("call", self._reader.take(), self._calls - 1)

    def _end_head(self) -> None:
        found = _HEAD.fullmatch(self._held[self._at :])
        if found and found["marked"]:
            self._reader = CallReader(name=found["name"])
