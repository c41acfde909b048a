"""What a step computes: rows through the decoder and the attention executor, then the sampler.

The runner runs it on the whole model, the start-up probe on one layer: the same code, so that what the
probe finds holds for what is served.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.models.decoder import Decoder
from engine.plan import SampleRow, ScoreRows, StepPlan
from engine.sampling.logprobs import token_logprobs
from engine.sampling.sampler import Drawn, Sampler
from engine.types import TokenLogprob

SCORE_BLOCK = 64
"""Rows of a prompt whose logits are held at once: 12 MB for a vocabulary of 49,152."""


class Padding(NamedTuple):
    """Multiples of rows at which no row's bits depend on the others: of the decoder's and the head's calls
    (on top of what the decoder asks for), and of the attention executor's query rows."""

    rows: int = 1
    queries: int = 4


class Pipeline:
    """A decoder, the KV memory it writes to, and a sampler. Belongs to the compute thread."""

    def __init__(self, decoder: Decoder, attention: AttentionBackend, sampler: Sampler) -> None:
        self.decoder = decoder
        self.attention = attention
        self.sampler = sampler
        self._rows = 1

    def pad(self, padding: Padding) -> None:
        """Pad calls from now on; between steps."""
        self._rows = padding.rows
        self.attention.row_multiple = padding.queries

    def hidden(self, plan: StepPlan) -> Tensor:
        """Do all of a step up to the final norm: [rows, hidden] of the plan's own rows.

        Raises ValueError on an impossible plan, and whatever the decoder or the executor raises.
        """
        self.attention.wipe(plan.wipe)
        self.attention.copy_rows(plan.copies)
        self.attention.begin(plan)
        padded = self.decoder.padded_rows(self._round(plan.rows))
        tokens, positions = np.zeros((2, padded), np.int64)
        tokens[: plan.rows] = plan.token_ids
        positions[: plan.rows] = plan.attention.positions
        hidden = self.decoder.forward(torch.from_numpy(tokens), torch.from_numpy(positions), self.attention)
        return hidden[: plan.rows]

    def logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        """fp32 logits [n, vocab] of some rows of `hidden`."""
        chosen = hidden.new_zeros(self._round(len(rows)), hidden.shape[1])
        chosen[: len(rows)] = hidden[list(rows)]
        return self.decoder.logits(chosen)[: len(rows)]

    def sample(self, hidden: Tensor, samples: Sequence[SampleRow]) -> Drawn:
        """Choose a token for each sample, from the logits of its row."""
        if not samples:
            return Drawn([], [], np.zeros(0, np.bool_), [], {})
        logits = self.logits(hidden, [sample.row for sample in samples])
        return self.sampler.sample(logits, samples)

    def score(self, hidden: Tensor, scores: Sequence[ScoreRows]) -> Iterator[tuple[TokenLogprob, ...] | None]:
        """Give the log-probabilities that each of `scores` asks for, None where a logit is not finite.

        Logits are made for SCORE_BLOCK rows at a time: those of a whole prompt would take gigabytes.
        """
        for score in scores:
            found: list[TokenLogprob] = []
            for start in range(0, len(score.targets), SCORE_BLOCK):
                targets = score.targets[start : start + SCORE_BLOCK]
                first = score.first + start
                logits = self.logits(hidden, range(first, first + len(targets)))
                if not finite_rows(logits).all():
                    break
                found += token_logprobs(logits, targets, [score.top] * len(targets))
            yield tuple(found) if len(found) == len(score.targets) else None

    def _round(self, rows: int) -> int:
        return -(-rows // self._rows) * self._rows


def finite_rows(hidden: Tensor) -> npt.NDArray[np.bool_]:
    """Which rows of [rows, hidden] have finite numbers only; a sum could overflow or cancel."""
    finite: npt.NDArray[np.bool_] = np.isfinite(hidden.float().cpu().numpy()).all(1)
    return finite
