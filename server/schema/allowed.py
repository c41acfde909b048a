"""Which words may stand at a place in a body: for messages that say what would have been right."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec import inspect


def words_at(struct: type[msgspec.Struct], steps: Sequence[str]) -> list[str]:
    """The words that `struct` allows at the end of a path; empty where other things are allowed there."""
    kinds: list[inspect.Type] = [inspect.type_info(struct)]
    for step in steps:
        kinds = [inner for kind in _plain(kinds) for inner in _inside(kind, step)]
    found = [kind.values for kind in _plain(kinds) if isinstance(kind, inspect.LiteralType)]
    return [str(word) for values in found for word in values]


def _plain(kinds: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    for kind in kinds:
        if isinstance(kind, inspect.UnionType):
            yield from _plain(kind.types)
        elif isinstance(kind, inspect.Metadata):
            yield from _plain([kind.type])
        else:
            yield kind


def _inside(kind: inspect.Type, step: str) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.StructType):
        yield from (field.type for field in kind.fields if field.encode_name == step)
        if kind.tag_field == step and kind.tag is not None:
            yield inspect.LiteralType((kind.tag,))
    elif isinstance(kind, inspect.ListType):
        yield kind.item_type
    elif isinstance(kind, inspect.DictType):
        yield kind.value_type
