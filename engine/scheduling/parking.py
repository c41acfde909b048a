"""Who waits for whom: a cold prefix is computed once, and others that need it wait until it is there."""

from __future__ import annotations

from collections.abc import Iterable

from engine.cache.node import common_prefix
from engine.scheduling.sequence import Sequence, State


def still_parked(seq: Sequence) -> bool:
    """Whether what a waiting sequence waits for is still to come; forgets it if not."""
    if seq.waits_for is None:
        return False
    owner, need = seq.waits_for
    if owner.state is State.RUNNING and owner.computed < need:
        return True
    seq.waits_for = None
    return False


def coming(seq: Sequence, stored: int, running: Iterable[Sequence]) -> int:
    """Tokens of the prompt of `seq` that are `stored`, or that a running sequence is about to store."""
    prompt = seq.request.prompt
    if stored == len(prompt):
        return stored
    shared = [
        common_prefix(owner.tokens, prompt, 0, min(len(prompt), owner.target))
        for owner in running
        # Whole prompts are compared only where the next token says that there may be more.
        if owner.prefilling
        and owner.namespace == seq.namespace
        and stored < owner.target
        and owner.tokens[stored] == prompt[stored]
    ]
    return max([stored, *shared])


def find_owner(seq: Sequence, matched: int, running: Iterable[Sequence]) -> tuple[Sequence, int] | None:
    """The running sequence that is about to compute most of what follows `matched` tokens of `seq`, and up to
    which token; None if none is.

    One that is itself behind `matched` (it may not use the cache) must save more rows than it is behind.
    """
    limit = seq.match_limit()
    best, found = matched, None
    for owner in running:
        if not owner.prefilling or owner.namespace != seq.namespace:
            continue
        if best >= min(limit, owner.target) or owner.tokens[best] != seq.tokens[best]:
            continue
        shared = common_prefix(owner.tokens, seq.tokens, 0, min(limit, owner.target))
        if shared > best and shared - matched > matched - owner.computed:
            best, found = shared, owner
    return None if found is None else (found, best)
