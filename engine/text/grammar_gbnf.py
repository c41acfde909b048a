"""Reads GBNF, the grammar notation of the GGUF world, and writes it as the matcher's own.

Every character becomes a terminal of its own: the matcher's lexer takes the longest match, which would make
`("a" | "ab") "b"` refuse "ab". A single character can't be extended, so the language is exactly GBNF's.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from engine.errors import RequestError

MAX_DEPTH = 64
MAX_RULES = 2_000
MAX_REPEAT = 5_000

_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
_REFERENCE = re.compile("\0([^\0]*)\0")
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "[": "[", "]": "]", "-": "-", "^": "^"}


class GbnfError(RequestError):
    """The grammar is not GBNF; the message names the line."""


class _Item(NamedTuple):
    """One element of a sequence as text, and the rule that it is a bare or optional reference to."""

    text: str
    ref: str | None = None
    optional: bool = False


def to_lark(text: str) -> str:
    """Return the grammar in the matcher's notation. Raises GbnfError."""
    rules = _Parser(text).rules()
    if "root" not in rules:
        raise GbnfError("the grammar has no rule 'root'")
    names = {"root": "start"}
    queue = ["root"]
    for name in queue:
        for ref in rules[name].refs:
            if ref not in names:
                names[ref] = f"r{len(names)}"
                queue.append(ref)
    lines = [f"{names[name]}: {_body(name, rules[name], names)}" for name in queue]
    return "%llguidance {}\n" + "\n".join(lines) + "\n"


class _Rule(NamedTuple):
    alternatives: list[list[_Item]]
    refs: dict[str, int]  # name -> line of its first use


def _body(name: str, rule: _Rule, names: dict[str, str]) -> str:
    """The right side of a rule, with recursion at its end turned into repetition.

    `a ::= x | y a` becomes (y)* x: the matcher's work per character would grow with the text otherwise.
    """
    steps: list[str] = []
    bases: list[str] = []
    for items in rule.alternatives:
        if items and items[-1].ref == name:
            steps.append(_sequence(items[:-1]))
            if items[-1].optional:
                bases.append(steps[-1])
        else:
            bases.append(_sequence(items))
    if steps and bases:
        text = f"({' | '.join(steps)})* ({' | '.join(bases)})"
    else:
        text = " | ".join(_sequence(items) for items in rule.alternatives)
    return _REFERENCE.sub(lambda match: names[match[1]], text)


def _sequence(items: list[_Item]) -> str:
    return " ".join(item.text for item in items) or '""'


class _Parser:
    """A cursor over the grammar's text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._refs: dict[str, int] = {}

    def rules(self) -> dict[str, _Rule]:
        found: dict[str, _Rule] = {}
        self._skip(newlines=True)
        while self._peek():
            name = self._name("a rule's name")
            if name in found:
                raise self._error(f"the rule {name!r} is defined twice")
            self._skip()
            if not self._text.startswith("::=", self._at):
                raise self._error(f"'::=' must follow the name {name!r}")
            self._at += 3
            self._skip(newlines=True)
            self._refs = {}
            found[name] = _Rule(self._alternatives(0), self._refs)
            if self._peek() and self._peek() not in "\r\n":
                raise self._error(f"{self._peek()!r} is not expected here")
            self._skip(newlines=True)
            if len(found) > MAX_RULES:
                raise self._error(f"the grammar has more than {MAX_RULES} rules")
        for rule in found.values():
            for ref, at in rule.refs.items():
                if ref not in found:
                    self._at = at
                    raise self._error(f"the rule {ref!r} is not defined")
        return found

    def _alternatives(self, depth: int) -> list[list[_Item]]:
        if depth > MAX_DEPTH:
            raise self._error(f"groups are nested more than {MAX_DEPTH} deep")
        found = [self._items(depth)]
        while self._next_is_bar():
            self._at += 1
            self._skip(newlines=True)
            found.append(self._items(depth))
        return found

    def _next_is_bar(self) -> bool:
        """Whether `|` comes next, on this line or a later one."""
        before = self._at
        self._skip(newlines=True)
        if self._peek() == "|":
            return True
        self._at = before
        return False

    def _items(self, depth: int) -> list[_Item]:
        found: list[_Item] = []
        while (char := self._peek()) and char not in "|)\r\n":
            item = self._element(char, depth)
            self._skip(newlines=depth > 0)
            while (char := self._peek()) and char in "*+?{":
                item = self._repeated(item, char)
                self._skip(newlines=depth > 0)
            found.append(item)
        return found

    def _element(self, char: str, depth: int) -> _Item:
        if char == '"':
            return _Item(self._literal())
        if char == "[":
            return _Item(self._char_class())
        if char == ".":
            self._at += 1
            return _Item("/(?s:.)/")
        if char == "(":
            self._at += 1
            self._skip(newlines=True)
            alternatives = self._alternatives(depth + 1)
            self._skip(newlines=True)
            if self._peek() != ")":
                raise self._error("a group lacks its ')'")
            self._at += 1
            return _Item(f"({' | '.join(_sequence(items) for items in alternatives)})")
        at = self._at
        name = self._name("a literal, a character class, a group or a rule's name")
        self._refs.setdefault(name, at)
        return _Item(f"\0{name}\0", ref=name)

    def _repeated(self, item: _Item, char: str) -> _Item:
        self._at += 1
        if char == "{":
            return _Item(f"({item.text}){self._bounds()}")
        bare = char == "?" and item.ref is not None and not item.optional
        return _Item(f"({item.text}){char}", item.ref if bare else None, bare)

    def _bounds(self) -> str:
        """What follows "{": "m}", "m,}", ",n}" or "m,n}"."""
        low = self._number()
        if self._peek() == "," and low is not None:
            self._at += 1
            self._skip(newlines=True)
            high = self._number()
        else:
            high = low
        if self._peek() != "}" or low is None:
            raise self._error("a repetition must be {m}, {m,} or {m,n}")
        self._at += 1
        if high is not None and high < low:
            raise self._error(f"the repetition {{{low},{high}}} runs backwards")
        if max(low, high or 0) > MAX_REPEAT:
            raise self._error(f"a repetition counts to more than {MAX_REPEAT}")
        return f"{{{low},{'' if high is None else high}}}"

    def _number(self) -> int | None:
        self._skip(newlines=True)
        start = self._at
        while self._peek() and self._peek() in "0123456789" and self._at - start < 12:
            self._at += 1
        digits = self._text[start : self._at]
        self._skip(newlines=True)
        return int(digits) if digits else None

    def _literal(self) -> str:
        self._at += 1
        chars: list[str] = []
        while self._peek() != '"':
            chars.append(json.dumps(self._char("a literal lacks its closing '\"'"), ensure_ascii=False))
        self._at += 1
        return f"({' '.join(chars)})" if len(chars) > 1 else "".join(chars) or '""'

    def _char_class(self) -> str:
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        parts: list[str] = []
        while self._peek() != "]":
            low = high = self._char("a character class lacks its ']'")
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._char("a character class lacks its ']'")
            if high < low:
                raise self._error(f"the range {low!r} to {high!r} runs backwards")
            parts.append(f"{_hex(low)}-{_hex(high)}")
        self._at += 1
        if not parts and not negated:
            raise self._error("a character class is empty")
        return f"/[{'^' if negated else ''}{''.join(parts)}]/" if parts else "/(?s:.)/"

    def _char(self, missing: str) -> str:
        char = self._peek()
        if not char:
            raise self._error(missing)
        self._at += 1
        if char != "\\":
            return char
        kind = self._peek()
        self._at += 1
        if kind in _ESCAPES:
            return _ESCAPES[kind]
        if size := _HEX.get(kind):
            digits = self._text[self._at : self._at + size]
            self._at += size
            if len(digits) == size and all(digit in "0123456789abcdefABCDEF" for digit in digits):
                code = int(digits, 16)
                if code <= 0x10FFFF and not 0xD800 <= code < 0xE000:
                    return chr(code)
            raise self._error(f"\\{kind}{digits} is no character")
        raise self._error(f"the escape \\{kind} is not known")

    def _name(self, wanted: str) -> str:
        start = self._at
        while self._peek() and self._peek() in _NAME:
            self._at += 1
        if self._at == start:
            raise self._error(f"{wanted} is expected, not {self._peek()!r}")
        return self._text[start : self._at]

    def _skip(self, *, newlines: bool = False) -> None:
        """Skip blanks and comments, and line ends where asked."""
        while char := self._peek():
            if char == "#":
                while self._peek() and self._peek() not in "\r\n":
                    self._at += 1
            elif char in " \t" or (newlines and char in "\r\n"):
                self._at += 1
            else:
                return

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _error(self, message: str) -> GbnfError:
        line = self._text.count("\n", 0, self._at) + 1
        return GbnfError(f"line {line}: {message}")


def _hex(char: str) -> str:
    return f"\\x{{{ord(char):X}}}"
