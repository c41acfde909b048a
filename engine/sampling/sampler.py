"""From a step's logits to tokens: greedy, sampled, constrained, and log-probabilities, in one call.

The order: raw logits (which log-probabilities are of, and finite is judged by), bias, penalties, masks,
temperature, filters. Rows without changes share their calls; one with changes is computed alone.

Promise: a row's token and log-probabilities have the same bits whatever rows stand beside it, however
many, and on however many threads. So nothing here sums over a row but torch's softmax and log_softmax
(one row, one thread, a fixed order), sequential cumulative sums, and comparisons, which don't round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.errors import ConstraintFailed
from engine.plan import SampleRow
from engine.sampling.cdf import choose
from engine.sampling.changes import allowed, changed, wants_changes
from engine.sampling.logprobs import token_logprobs
from engine.sampling.mirostat import bound_after, bound_before, least_probability
from engine.sampling.random import uniform
from engine.sampling.ranking import Float32
from engine.types import SamplingParams, TokenLogprob

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
        to the lowest id. A row that fails keeps its failure to itself.
        """
        if logits.shape != (len(rows), self._vocab_size):
            raise ValueError(f"logits are {tuple(logits.shape)}, not {(len(rows), self._vocab_size)}")
        logits = logits.detach()
        table = logits.numpy()
        # numpy's argmax takes the first of equals, and gives a NaN if there is one, as min does.
        best = table.argmax(axis=1)
        top = table[np.arange(len(rows)), best]
        finite = np.isfinite(top) & np.isfinite(table.min(axis=1))
        tokens: list[int] = np.where(finite, best, 0).tolist()
        drawn = Drawn(tokens, [None] * len(rows), finite, [None] * len(rows), {})

        alike: list[int] = []
        for j, (row, sound) in enumerate(zip(rows, finite.tolist(), strict=True)):
            if not sound:
                continue
            if wants_changes(row):
                self._draw_changed(table[j], row, j, drawn)
            elif row.params.temperature > 0.0:
                alike.append(j)
        if alike:
            self._draw(logits, top, rows, alike, drawn)
        self._report(logits, rows, drawn)
        return drawn

    def _draw(
        self, logits: Tensor, top: Float32, rows: Sequence[SampleRow], alike: list[int], drawn: Drawn
    ) -> None:
        """Draw from the raw logits of the rows `alike`."""
        picked = _select(logits, alike)
        probs = _probabilities(picked, top[alike], [rows[j].params for j in alike])
        for j, row, prob in zip(alike, picked.numpy(), probs, strict=True):
            drawn.tokens[j], drawn.bounds[j] = _pick(row, prob, float(top[j]), rows[j])

    def _draw_changed(self, logits: Float32, row: SampleRow, j: int, drawn: Drawn) -> None:
        """Choose from one row's logits after its changes, among the tokens that are allowed."""
        try:
            ids = allowed(row, self._vocab_size)
        except ConstraintFailed as failure:
            drawn.tokens[j] = 0
            drawn.errors[j] = str(failure)
            return
        values = changed(logits, row)
        if ids is not None:
            values = values[ids]
        place = int(values.argmax())
        if row.params.temperature > 0.0:
            probs = _probabilities(torch.from_numpy(values)[None], values[place : place + 1], [row.params])[0]
            place, drawn.bounds[j] = _pick(values, probs, float(values[place]), row)
        drawn.tokens[j] = place if ids is None else int(ids[place])

    def _report(self, logits: Tensor, rows: Sequence[SampleRow], drawn: Drawn) -> None:
        """Fill in the log-probabilities that were asked for."""
        asked = [j for j, row in enumerate(rows) if row.params.logprobs is not None]
        asked = [j for j in asked if drawn.finite[j] and j not in drawn.errors]
        if not asked:
            return
        counts = [rows[j].params.logprobs or 0 for j in asked]
        reports = token_logprobs(_select(logits, asked), [drawn.tokens[j] for j in asked], counts)
        for j, report in zip(asked, reports, strict=True):
            drawn.logprobs[j] = report


def _probabilities(logits: Tensor, top: Float32, params: Sequence[SamplingParams]) -> Float32:
    """Softmax of each row under its temperature: fp32 [n, V]. top: fp32 [n], the rows' largest logits."""
    temperatures = torch.tensor([max(p.temperature, _COLDEST) for p in params])
    # The largest logit goes to 0 first, so no temperature can overflow it.
    heights = torch.from_numpy(top)
    scaled = (logits - heights[:, None]).div_(temperatures[:, None])
    probs: Float32 = torch.softmax(scaled, dim=-1).numpy()
    return probs


def _pick(logits: Float32, probs: Float32, top: float, row: SampleRow) -> tuple[int, float | None]:
    """The place of the token in `logits`, and mirostat's next bound."""
    params = row.params
    drawn = uniform(row.seed, row.prompt_index, row.choice_index, row.position)
    bound = bound_before(params, row.bound)
    if bound is None:
        return choose(logits, probs, top, params, drawn), None
    place = choose(logits, probs, top, params, drawn, least_probability(bound))
    return place, bound_after(params, bound, float(probs[place]))


def _select(logits: Tensor, indices: list[int]) -> Tensor:
    return logits if len(indices) == len(logits) else logits[indices]
