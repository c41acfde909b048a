"""From a step's logits to tokens: greedy, sampled and log-probabilities in one call.

Promise: a row's token and log-probabilities have the same bits whatever rows stand beside it, however
many, and on however many threads. So nothing here sums over a row but torch's softmax and log_softmax
(one row, one thread, a fixed order), a sequential cumulative sum, and comparisons, which don't round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.plan import SampleRow
from engine.sampling.cdf import choose
from engine.sampling.logprobs import token_logprobs
from engine.sampling.random import uniform
from engine.sampling.ranking import Float32
from engine.types import TokenLogprob

_COLDEST = float(torch.finfo(torch.float32).tiny)


class Drawn(NamedTuple):
    """What n rows drew, in their order.

    `tokens`: n ids. `logprobs`: n reports, None where not asked for. `finite`: bool [n], False where any
    raw logit of the row is NaN or infinite: such a row has token 0 and no report, which mean nothing.
    `bounds`: mirostat's bounds in bits for the next position, None where off. `errors`: for rows from
    which no token can be chosen, why; their token 0 means nothing either.
    """

    tokens: list[int]
    logprobs: list[TokenLogprob | None]
    finite: npt.NDArray[np.bool_]
    bounds: list[float | None]
    errors: dict[int, str]


class Sampler:
    """Chooses tokens. Stateless between calls; belongs to the compute thread, as all torch does."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> Drawn:
        """Choose one token for each row.

        logits: fp32 [n, V], row j belonging to rows[j]. Temperature 0 takes the largest logit, ties going
        to the lowest id.
        """
        if logits.shape != (len(rows), self._vocab_size):
            raise ValueError(f"logits are {tuple(logits.shape)}, not {(len(rows), self._vocab_size)}")
        logits = logits.detach()
        table = logits.numpy()
        # numpy's argmax takes the first of equals, and gives a NaN if there is one, as min does.
        best = table.argmax(axis=1)
        top = np.take_along_axis(table, best[:, None], axis=1)[:, 0]
        finite = np.isfinite(top) & np.isfinite(table.min(axis=1))
        tokens: list[int] = np.where(finite, best, 0).tolist()

        drawn = [j for j, row in enumerate(rows) if finite[j] and row.params.temperature > 0.0]
        if drawn:
            for j, token in zip(drawn, self._draw(logits, top, rows, drawn), strict=True):
                tokens[j] = token

        logprobs: list[TokenLogprob | None] = [None] * len(rows)
        asked = [j for j, row in enumerate(rows) if finite[j] and row.params.logprobs is not None]
        if asked:
            counts = [rows[j].params.logprobs or 0 for j in asked]
            reports = token_logprobs(_select(logits, asked), [tokens[j] for j in asked], counts)
            for j, report in zip(asked, reports, strict=True):
                logprobs[j] = report
        return Drawn(tokens, logprobs, finite, [None] * len(rows), {})

    def _draw(self, logits: Tensor, top: Float32, rows: Sequence[SampleRow], drawn: list[int]) -> list[int]:
        picked = _select(logits, drawn)
        temperatures = torch.tensor([max(rows[j].params.temperature, _COLDEST) for j in drawn])
        # The largest logit goes to 0 first, so no temperature can overflow it.
        heights = torch.from_numpy(top[drawn])
        probs = torch.softmax((picked - heights[:, None]).div_(temperatures[:, None]), dim=-1).numpy()
        return [
            choose(row, prob, float(top[j]), rows[j].params, _uniform(rows[j]))
            for j, row, prob in zip(drawn, picked.numpy(), probs, strict=True)
        ]


def _uniform(row: SampleRow) -> float:
    return uniform(row.seed, row.prompt_index, row.choice_index, row.position)


def _select(logits: Tensor, indices: list[int]) -> Tensor:
    return logits if len(indices) == len(logits) else logits[indices]
