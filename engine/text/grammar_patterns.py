"""Rewrites a JSON schema's regular expressions so that the matcher reads them as they are meant.

Where a set of characters holds all of U+0000 to U+001F (U+000A aside), the matcher takes it for one that
holds the quote and the backslash too: what [^"] excludes came through as an escape. No set that lacks U+0000
is mistaken, and no reply can hold U+0000 (see grammar_source for the escapes that are allowed), so a pattern
without it means the same, also where it is negated.
"""

from __future__ import annotations

import re

from engine.errors import RequestError

_ATOM = re.compile(
    r"\\(?:[xuU]\{[^}]*\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[pP]\{[^}]*\}|[pP].|.)|.", re.DOTALL
)
_NUL = re.compile(r"\x00|\\x00|\\u0000|\\U00000000|\\[xuU]\{0+\}")
_FLAGS = re.compile(r"\(\?([a-zA-Z-]+)[:)]")
_NOTHING = "[a&&b]"  # a class without a character
_SPECIAL = frozenset("[]&~-^")  # in classes: the matcher knows operators that ECMA 262 doesn't


def without_nul(pattern: str) -> str:
    """The same pattern with U+0000 in no class. Raises RequestError where flags change its notation."""
    for flags in _FLAGS.findall(pattern):
        if not set(flags) <= set("ims-"):
            raise RequestError(f"the pattern {pattern[:100]!r} has the flags {flags[:20]!r}")
    parts = []
    at = 0
    while found := _ATOM.match(pattern, at):
        atom, at = found[0], found.end()
        if atom == "[":
            atom, at = _class(pattern, at)
        elif _NUL.fullmatch(atom):
            atom = _NOTHING
        elif atom.startswith(("\\p", "\\P")):
            atom = f"[{atom}--\\x00]"
        parts.append(atom)
    return "".join(parts)


def _class(pattern: str, at: int) -> tuple[str, int]:
    """The class whose "[" is before `at`, and where it ends; in it, "[" and "&&" are characters."""
    start = at
    negated = pattern.startswith("^", at)
    at += negated
    items: list[str] = []
    nul = False
    while found := _ATOM.match(pattern, at):
        low, at = found[0], found.end()
        if low == "]" and items:
            break
        nul = nul or _NUL.fullmatch(low) is not None or (not negated and low.startswith(("\\p", "\\P")))
        item = _escaped(low)
        if pattern.startswith("-", at) and (end := _ATOM.match(pattern, at + 1)) and end[0] != "]":
            item, at = f"{item}-{_escaped(end[0])}", end.end()
        items.append(item)
    else:
        return pattern[start - 1 :], len(pattern)  # it lacks its "]": the matcher says so
    inside = "".join(items)
    if negated:
        return f"[^{inside}]" if nul else f"[^\\x00{inside}]", at
    return f"[{inside}--\\x00]" if nul else f"[{inside}]", at


def _escaped(atom: str) -> str:
    if atom == "\0":
        return "\\x00"
    return "\\" + atom if atom in _SPECIAL else atom
