"""Immutable plans between the stages: what the scheduler decides, the runner executes.

No torch here: plans are numpy arrays, the same for every backend.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from engine.errors import ConfigError
from engine.types import Constraint, SamplingParams, TokenLogprob

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


class CascadeLevel(NamedTuple):
    """One level of a cascade: segment s holds rows [qo_indptr[s], qo_indptr[s+1]), which attend to the
    pages kv_indices[kv_indptr[s] : kv_indptr[s+1]], of which the last holds last_page_len[s] tokens.

    An empty segment has no pages and last_page_len 0. Every level covers all rows. All int32.
    """

    qo_indptr: Int32
    kv_indptr: Int32
    kv_indices: Int32
    last_page_len: Int32


class CascadePlan(NamedTuple):
    """How the rows of one step attend: shared spans first, private tails last.

    In every level but the last, each row attends to the whole of its segment (all its rows lie after
    that span); spans there are multiples of `align` tokens. The last level has one segment a sequence,
    is causal, and starts at absolute token `kv_start[i]` (a multiple of `align`), which is the length of
    the sequence's shared spans. Row r stands at absolute position positions[r].

    `groups` counts the shared segments, `grouped_rows` the rows that stand in one, `saved_tokens` the KV
    tokens a layer that are not read again thanks to them, `refused` the shared prefixes that could have had
    a segment and did not pay for it.
    """

    align: int
    levels: tuple[CascadeLevel, ...]
    kv_start: Int32
    positions: Int32
    groups: int = 0
    grouped_rows: int = 0
    saved_tokens: int = 0
    refused: int = 0


class RowCopy(NamedTuple):
    """Copy KV rows [0, rows) of page `source` to page `target`, in every layer."""

    source: int
    target: int
    rows: int


class Past:
    """The tokens before the next one, kept so that a step costs what the newest token costs, not the whole.

    One sequence owns it, and lets it grow between steps only: while one runs nobody changes it.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.generated: list[int] = []  # for reading
        self._prompt = prompt
        self._places: dict[int, int] = {}
        self._ids = array("q")
        self._counts = array("q")

    def append(self, token: int) -> None:
        """Take in a generated token."""
        self.generated.append(token)
        place = self._places.setdefault(token, len(self._ids))
        if place < len(self._ids):
            self._counts[place] += 1
        else:
            self._ids.append(token)
            self._counts.append(1)

    @cached_property
    def prompt_ids(self) -> Int64:
        """The tokens of the prompt, each once."""
        return np.unique(np.array(self._prompt, np.int64))

    def counted(self) -> tuple[Int64, Int64]:
        """The generated tokens, each once, and how often each came."""
        return np.array(self._ids, np.int64), np.array(self._counts, np.int64)


class SampleRow(NamedTuple):
    """One row whose logits are wanted, and how to choose from them.

    `row` indexes the step's rows. (seed, prompt_index, choice_index, position) key the random number.
    `past` are the sequence's tokens so far, given only where `params` or `constraint` ask for them (see
    `needs_tokens`). `bound` is mirostat's surprise bound in bits, None before the first token.
    """

    row: int
    params: SamplingParams
    seed: int
    prompt_index: int
    choice_index: int
    position: int
    past: Past | None = None
    constraint: Constraint | None = None
    bound: float | None = None


def needs_tokens(params: SamplingParams) -> bool:
    """Whether choosing a token depends on the tokens before it."""
    return bool(params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty)


class ScoreRows(NamedTuple):
    """Prompt rows whose logits score the tokens that follow them.

    Row `first` + i of the step gives the log-probability of `targets[i]` and the `top` likeliest.
    `sequence` is the index of the sequence in the plan.
    """

    first: int
    targets: tuple[int, ...]
    top: int
    sequence: int


class StepPlan(NamedTuple):
    """Everything one step does. Order: wipe, copies, then the forward pass (KV is written before a
    layer attends), then sampling.

    Rows of sequence i are [row_indptr[i], row_indptr[i+1]). `write_slots[r]` is page * page_size +
    offset of row r's own KV. `sequence_ids[i]` is the scheduler's id of the sequence.
    """

    step: int
    sequence_ids: tuple[int, ...]
    row_indptr: Int32
    token_ids: Int64
    write_slots: Int64
    attention: CascadePlan
    samples: tuple[SampleRow, ...]
    sample_sequences: tuple[int, ...]
    copies: tuple[RowCopy, ...] = ()
    wipe: tuple[int, ...] = ()
    scores: tuple[ScoreRows, ...] = ()

    @property
    def rows(self) -> int:
        return int(self.token_ids.shape[0])


class StepResult(msgspec.Struct, frozen=True):
    """What a step gave.

    `tokens[j]` and `logprobs[j]` (None where not asked) belong to samples[j] of the plan. `bad` names
    the indices i of sequences that had a non-finite hidden state or logit in any of their rows; their
    tokens mean nothing. `seconds` is the time on the compute thread. `verified` says that the step was
    computed a second time, flat; `differing_rows` of its rows were not the same then. `bounds[j]` is
    mirostat's bound after samples[j] (None where off); `errors` says of a sample j why no token could be
    chosen, its token means nothing. `scores[k]` belongs to scores[k] of the plan.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]
    bad: frozenset[int] = frozenset()
    seconds: float = 0.0
    verified: bool = False
    differing_rows: int = 0
    bounds: tuple[float | None, ...] = ()
    errors: dict[int, str] = {}
    scores: tuple[tuple[TokenLogprob, ...], ...] = ()


class StepCosts(msgspec.Struct, frozen=True):
    """Measured time of a step: base + rows * row + pairs * pair, in ms.

    A pair is one row times one token of its context.
    """

    base_ms: float = 0.0
    row_ms: float = 0.0
    pair_ms: float = 0.0

    def predict(self, rows: int, pairs: int) -> float:
        """Milliseconds that a step of `rows` rows and `pairs` row-context pairs is expected to take."""
        return self.base_ms + rows * self.row_ms + pairs * self.pair_ms

    def scaled(self, factor: float) -> StepCosts:
        """The costs on a machine that takes `factor` times as long."""
        return StepCosts(self.base_ms * factor, self.row_ms * factor, self.pair_ms * factor)


class GateCosts(msgspec.Struct, frozen=True):
    """What shared segments gain and cost on a device, in ns a layer.

    `byte_ns` is gained for each byte of KV that is not read again; each shared segment costs `segment_ns`,
    each shared level `level_ns`. The default says that sharing is free: all that saves KV bytes is shared.
    """

    byte_ns: float = 0.02
    segment_ns: float = 0.0
    level_ns: float = 0.0

    def profit_ns(self, saved_bytes: float, segments: int, levels: int) -> float:
        """Time gained a layer by a plan that saves `saved_bytes` with so many shared segments and levels."""
        return saved_bytes * self.byte_ns - segments * self.segment_ns - levels * self.level_ns

    @property
    def plausible(self) -> bool:
        """Whether the numbers can be times: from 0, and not beyond all measure."""
        return all(0 <= value < 1e15 for value in msgspec.structs.astuple(self))

    @classmethod
    def parse(cls, text: str) -> GateCosts:
        """Read "byte_ns=0.02,segment_ns=500"; what is not named keeps its default. ConfigError."""
        values: dict[str, float] = {}
        for part in text.split(","):
            name, _, number = part.partition("=")
            try:
                values[name.strip()] = float(number)
            except ValueError:
                break
        else:
            if values.keys() <= set(cls.__struct_fields__) and (costs := cls(**values)).plausible:
                return costs
        raise ConfigError(
            f"HEADWATER_CASCADE_COSTS={text!r} is not allowed: give numbers from 0 as"
            f" {','.join(f'{name}=..' for name in cls.__struct_fields__)}"
        )


def flatten(attention: CascadePlan) -> CascadePlan:
    """The same rows with nothing shared: each sequence's shared pages stand in front of its private ones."""
    *shared, private = attention.levels
    first = private.qo_indptr[:-1]
    parts = [(np.searchsorted(level.qo_indptr, first, side="right") - 1, level) for level in shared]
    parts.append((np.arange(len(first)), private))
    counts = [np.diff(level.kv_indptr)[segment] for segment, level in parts]
    indptr = np.zeros(len(first) + 1, np.int32)
    np.cumsum(np.sum(counts, axis=0), out=indptr[1:])
    indices = np.empty(int(indptr[-1]), np.int32)
    at = indptr[:-1].astype(np.int64)
    for (segment, level), count in zip(parts, counts, strict=True):
        offset = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        indices[np.repeat(at, count) + offset] = level.kv_indices[
            np.repeat(level.kv_indptr[segment], count) + offset
        ]
        at += count
    level = private._replace(kv_indptr=indptr, kv_indices=indices)
    return CascadePlan(attention.align, (level,), np.zeros_like(attention.kv_start), attention.positions)
