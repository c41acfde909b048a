"""Replies taken apart in the tests: fed in pieces, and joined again."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from engine.text.replies import Part, ReplyParser


def fed(parser: ReplyParser, pieces: Iterable[str]) -> list[Part]:
    """The parts as they come."""
    found = [part for piece in pieces for part in parser.push(piece)]
    return [*found, *parser.finish()]


def joined(parts: Iterable[Part]) -> list[Part]:
    """The parts with neighbours of one kind and index in one."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if last and (last.kind, last.index) == (part.kind, part.index):
            assert part.name is None, "a call's name comes once"
            found[-1] = last._replace(text=last.text + part.text)
        else:
            found.append(part)
    return found


def cut(text: str, places: Iterable[int]) -> list[str]:
    """The text cut at these places."""
    ends = sorted({0, len(text), *(place for place in places if place <= len(text))})
    return [text[start:end] for start, end in pairwise(ends)]


def content(text: str) -> Part:
    return Part("content", text)


def reasoning(text: str) -> Part:
    return Part("reasoning", text)


def call(index: int, name: str, arguments: str) -> Part:
    return Part("call", arguments, index, name)
