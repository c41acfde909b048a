"""One sequence on its way through the engine: its tokens, its pages, how far it is."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from enum import Enum
from typing import TYPE_CHECKING

from engine.plan import Past, needs_tokens
from engine.types import CacheReceipt, EngineRequest, FinishReason, TokenLogprob

if TYPE_CHECKING:
    from engine.cache.node import Node


PAGE_TYPE = "i"
"""Page tables are arrays of this type, 32 bits: plans copy thousands of entries out of them in each step."""


class State(Enum):
    """WAITING holds nothing; RUNNING was admitted and holds pins and pages; FINISHED holds nothing again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """State of one request. Only the scheduler and its parts write here.

    `tokens` is the prompt and what was generated. KV of tokens [0, computed) is committed. `table` names
    the pages of all tokens up to the chunk in flight: pages [0, shared) stand in the tree on the path that
    ends at `node`, which is pinned; the rest are this sequence's own, the first of them named by `tail` when
    its rows have been published. `target` is the end of the prefill it was admitted for. `rank` orders
    sequences: who comes first is served first and loses its place last; while more urgent ones wait for its
    prefill it is as urgent as they are. `scored` are the prompt's
    log-probabilities so far, `bound` is mirostat's; `past` is there where the choice of tokens depends on
    those before.
    """

    __slots__ = (
        "bound",
        "computed",
        "ending",
        "high_water",
        "id",
        "namespace",
        "node",
        "past",
        "rank",
        "receipt",
        "request",
        "scored",
        "seed",
        "shared",
        "state",
        "table",
        "tail",
        "target",
        "tokens",
        "waits_for",
    )

    def __init__(self, id: int, request: EngineRequest, namespace: Hashable, seed: int) -> None:
        self.id = id
        self.request = request
        self.namespace = namespace
        self.seed = seed
        self.state = State.WAITING
        self.tokens = list(request.prompt)
        self.computed = 0
        self.high_water = 0
        self.target = 0
        self.table = array(PAGE_TYPE)
        self.shared = 0
        self.node: Node | None = None
        self.tail: Node | None = None
        self.receipt: CacheReceipt | None = None
        self.waits_for: tuple[Sequence, int] | None = None
        self.ending: FinishReason | None = None
        self.rank = own_rank(self)
        self.bound: float | None = None
        told = request.constraint is not None or needs_tokens(request.params)
        self.past = Past(request.prompt) if told else None
        # Nothing predicts a prompt's first token.
        starts = request.prompt_logprobs is not None and request.prompt_logprobs_from == 0
        self.scored: list[TokenLogprob | None] = [None] if starts else []

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Rows still to run before the next token can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def prefilling(self) -> bool:
        return self.computed < self.target

    @property
    def prompt_rows(self) -> int:
        """Rows of the prompt that were run and committed, those from the cache left out."""
        if self.receipt is None:
            return 0
        return max(0, min(self.high_water, self.prompt_len) - self.receipt.cached_tokens)

    @property
    def next_score(self) -> int | None:
        """Position of the prompt token whose log-probability is still to be had, None if there is none."""
        if self.request.prompt_logprobs is None:
            return None
        position = self.request.prompt_logprobs_from + len(self.scored)
        return position if position < self.prompt_len else None

    def match_limit(self) -> int:
        """Tokens that may come from the cache: the last one must run to give logits, and so must the one
        before each prompt token whose log-probability is wanted."""
        limit = len(self.tokens) - 1
        if (score := self.next_score) is not None:
            limit = min(limit, score - 1)
        cap = self.request.cache_max_len
        return limit if cap is None else min(limit, cap)

    def __repr__(self) -> str:
        return f"<Sequence {self.id} {self.state.value} {self.computed}/{len(self.tokens)}>"


def own_rank(seq: Sequence) -> tuple[int, int]:
    """Its place by priority and arrival."""
    return -seq.request.priority, seq.id
