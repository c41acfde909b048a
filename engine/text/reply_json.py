"""Reads JSON that comes in pieces, cut anywhere: a value, and the object that a call of a tool is."""

from __future__ import annotations

import json
import re

from engine.text.reply_parts import BLANKS

_STRING_STOPS = re.compile(r'["\\\x00-\x1f]')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_RUN = re.compile(r"[-+.0-9eE]*")
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_LONGEST_NUMBER = 1000
_ARGUMENTS = ("arguments", "parameters")


class ValueReader:
    """Follows one JSON value (RFC 8259) to its end.

    After `feed` either everything was taken, or the value is `done`, or it `failed` at the place returned.
    A number that stands alone is done with the first character after it.
    """

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._closers: list[str] = []
        self._wants = "value"
        self._token = ""  # what is being read: "" (nothing), string, escape, hex, literal or number
        self._is_key = False
        self._digits = 0
        self._atom = ""

    def feed(self, text: str, at: int = 0) -> int:
        """Take `text` from `at` on; return where reading ended."""
        while at < len(text) and not self.done and not self.failed:
            match self._token:
                case "":
                    at = self._between(text, at)
                case "string":
                    at = self._string(text, at)
                case "number":
                    at = self._number(text, at)
                case _:
                    at = self._character(text[at], at)
        return at

    def _between(self, text: str, at: int) -> int:
        char = text[at]
        if char in BLANKS:
            return at + 1
        match self._wants:
            case "value" | "first value":
                if char == "]" and self._wants == "first value":
                    return self._close(char, at)
                return self._begin(char, at)
            case "key" | "first key":
                if char == "}" and self._wants == "first key":
                    return self._close(char, at)
                if char != '"':
                    return self._fail(at)
                self._token, self._is_key = "string", True
            case "colon":
                if char != ":":
                    return self._fail(at)
                self._wants = "value"
            case _:
                if char != ",":
                    return self._close(char, at)
                self._wants = "key" if self._closers[-1] == "}" else "value"
        return at + 1

    def _begin(self, char: str, at: int) -> int:
        if char == "{":
            self._closers.append("}")
            self._wants = "first key"
        elif char == "[":
            self._closers.append("]")
            self._wants = "first value"
        elif char == '"':
            self._token, self._is_key = "string", False
        elif char in _LITERALS:
            self._token, self._atom = "literal", char
        elif char == "-" or (char.isascii() and char.isdigit()):
            self._token, self._atom = "number", ""
            return at
        else:
            return self._fail(at)
        return at + 1

    def _string(self, text: str, at: int) -> int:
        stop = _STRING_STOPS.search(text, at)
        if stop is None:
            return len(text)
        if stop[0] == '"':
            self._end_token()
        elif stop[0] == "\\":
            self._token = "escape"
        else:
            return self._fail(stop.start())
        return stop.end()

    def _character(self, char: str, at: int) -> int:
        """Take one character of an escape or of a literal."""
        if self._token == "literal":
            self._atom += char
            whole = _LITERALS[self._atom[0]]
            if not whole.startswith(self._atom):
                return self._fail(at)
            if self._atom == whole:
                self._end_token()
        elif self._token == "hex":
            if char not in "0123456789abcdefABCDEF":
                return self._fail(at)
            self._digits += 1
            if self._digits == 4:
                self._token = "string"
        elif char == "u":
            self._token, self._digits = "hex", 0
        elif char in '"\\/bfnrt':
            self._token = "string"
        else:
            return self._fail(at)
        return at + 1

    def _number(self, text: str, at: int) -> int:
        run = _NUMBER_RUN.match(text, at)
        assert run is not None
        self._atom += run[0]
        if len(self._atom) > _LONGEST_NUMBER:
            # Where the limit is passed must not depend on how the text is cut.
            return self._fail(run.end() - len(self._atom) + _LONGEST_NUMBER)
        if run.end() < len(text):
            if not _NUMBER.fullmatch(self._atom):
                return self._fail(run.end())
            self._end_token()
        return run.end()

    def _end_token(self) -> None:
        self._token = ""
        if self._is_key:
            self._wants, self._is_key = "colon", False
        else:
            self._end_value()

    def _close(self, char: str, at: int) -> int:
        if char != self._closers[-1]:
            return self._fail(at)
        self._closers.pop()
        self._end_value()
        return at + 1

    def _end_value(self) -> None:
        self._wants = "comma"
        self.done = not self._closers

    def _fail(self, at: int) -> int:
        self.failed = True
        return at


class CallReader:
    """Reads the JSON object of one call and gives its arguments on as they come.

    `name` is set once it is known whole. The call is `announced` once it is certain to be one: its name is
    known and its arguments have begun, or need not begin any more. From then on `take` gives the text of the
    arguments, exactly as written. Arguments are the object under "arguments" or "parameters", whichever
    comes first; a string that holds an object counts as that object; null, and an object without arguments,
    count as {} (the latter not where `needs_arguments`). What else the object has is passed over.

    Reading ends when the call is `done` or has `failed`; it is `broken` where arguments were being given.
    With a `name` only the object of arguments is read.
    """

    def __init__(self, *, needs_arguments: bool = False, name: str | None = None) -> None:
        self.name = name
        self.announced = False
        self.done = False
        self.failed = False
        self.broken = False
        self._alone = name is not None
        self._needs_arguments = needs_arguments
        self._wants = "value" if self._alone else "open"
        self._key = "arguments"
        self._value: ValueReader | None = None
        self._role = ""
        self._seen: list[str] = []  # the text of what is being read, where it is wanted whole
        self._begun = False
        self._text: list[str] = []

    def feed(self, text: str, at: int = 0) -> int:
        """Take `text` from `at` on; return where reading ended."""
        while at < len(text) and not self.done and not self.failed:
            at = self._between(text[at], at) if self._value is None else self._inside(text, at)
        return at

    def take(self) -> str:
        """What was added to the arguments since the last time; "" before the call is announced."""
        if not self.announced:
            return ""
        text = "".join(self._text)
        self._text.clear()
        return text

    def end(self) -> bool:
        """End the text. Return whether this is a call: one whose name is known is, before its arguments."""
        if not self.announced and self.name is not None and not self._begun and not self._needs_arguments:
            self.announced = not self.failed
        return self.announced

    def _between(self, char: str, at: int) -> int:
        if char in BLANKS:
            return at + 1
        if self._wants == "value":
            self._begin(char)
            return at
        if char == "}" and self._wants in ("first key", "comma"):
            self._end_object()
        elif char == '"' and self._wants in ("first key", "key"):
            self._read("key")
            return at
        elif (self._wants, char) in (("open", "{"), ("colon", ":"), ("comma", ",")):
            self._wants = {"open": "first key", "colon": "value", "comma": "key"}[self._wants]
        else:
            self.failed = True
            return at
        return at + 1

    def _begin(self, char: str) -> None:
        if self._key == "name" and self.name is None:
            self._read("name")
            self.failed = char != '"'
        elif self._key in _ARGUMENTS and not self._begun:
            self._begun = True
            roles = {"{": "arguments"} if self._alone else {"{": "arguments", '"': "encoded", "n": "null"}
            self._read(roles.get(char, ""))
            self.failed = char not in roles
            self.announced = char == "{" and self.name is not None
        else:
            self._read("other")

    def _read(self, role: str) -> None:
        self._role, self._value = role, ValueReader()
        self._seen.clear()

    def _inside(self, text: str, at: int) -> int:
        assert self._value is not None
        end = self._value.feed(text, at)
        if self._role == "arguments":
            self._text.append(text[at:end])
        elif self._role != "other":
            self._seen.append(text[at:end])
        if self._value.failed:
            self.failed = True
            self.broken = self.announced and self._role == "arguments"
        elif self._value.done:
            self._value = None
            self._end_value()
        return end

    def _end_value(self) -> None:
        self._wants = "colon" if self._role == "key" else "comma"
        if self._role == "key":
            self._key = json.loads("".join(self._seen))
        elif self._role == "name":
            name = json.loads("".join(self._seen))
            self.failed = not name.strip() or not _is_text(name)
            self.name = name
            self.announced = self._begun and not self.failed
        elif self._role in ("encoded", "null"):
            arguments = "{}" if self._role == "null" else _object_in("".join(self._seen))
            self.failed = arguments is None
            self._text.append(arguments or "")
            self.announced = self.name is not None and not self.failed
        self.done = self._alone

    def _end_object(self) -> None:
        if self.name is None or (self._needs_arguments and not self._begun):
            self.failed = True
            return
        if not self._begun:
            self._text.append("{}")
        self.announced = self.done = True


def _object_in(written: str) -> str | None:
    """The JSON object inside a JSON string, if there is one."""
    text: str = json.loads(written)
    reader = ValueReader()
    end = reader.feed(text)
    blank_after = not text[end:].strip(BLANKS)
    return text if reader.done and blank_after and text.lstrip(BLANKS)[:1] == "{" and _is_text(text) else None


def _is_text(text: str) -> bool:
    """Whether a string has no half of a surrogate pair, which escapes can write."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)
