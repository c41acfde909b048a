"""Drops a chat's oldest turns where its prompt would be too long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine import ContextLengthExceeded
from engine.text import texts_of

Turns = list[dict[str, Any]]


def size_of(value: Any) -> int:
    """Bytes of all text in a JSON-like value."""
    return sum(len(text.encode("utf-8", "replace")) for text in texts_of(value))


def shorten(
    turns: Turns, beside: int, encode: Callable[[Turns], tuple[int, ...]], limit: int, most: int
) -> tuple[int, ...]:
    """The prompt's ids with as few of the oldest turns dropped as bring it to `limit` tokens.

    System turns and the last one stay, and what stays begins with a question: without it an answer says
    nothing, nor does a result without its call. `beside` is the size of the tools in bytes; more than `most`
    bytes in all have more than `limit` tokens, which is known without the long work of tokenizing them.
    Raises ContextLengthExceeded.
    """
    droppable = [i for i, turn in enumerate(turns[:-1]) if turn["role"] != "system"]
    cuts = [0, *(n for n in range(1, len(droppable) + 1) if _is_cut(turns, droppable, n))]
    sizes = [size_of(turn) for turn in turns]
    left = beside + sum(sizes)
    few, gone = 0, 0
    while few < len(cuts) and left > most:
        few += 1
        if few < len(cuts):
            left -= sum(sizes[i] for i in droppable[gone : cuts[few]])
            gone = cuts[few]
    best, many = None, len(cuts) - 1
    while few <= many:
        middle = few if best is None and few == 0 else (few + many) // 2
        dropped = set(droppable[: cuts[middle]])
        ids = encode([turn for i, turn in enumerate(turns) if i not in dropped])
        if len(ids) <= limit:
            best, many = ids, middle - 1
        else:
            few = middle + 1
    if best is None:
        raise ContextLengthExceeded(
            f"System turns, tools and the last turn have more tokens than 'prompt_truncate_len' {limit}",
            param="prompt_truncate_len",
        )
    return best


def _is_cut(turns: Turns, droppable: list[int], dropped: int) -> bool:
    """Whether the conversation may begin behind so many dropped turns."""
    return dropped == len(droppable) or turns[droppable[dropped]]["role"] == "user"
