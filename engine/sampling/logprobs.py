"""Log-probabilities of generated tokens: of the raw logits, before temperature and filters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.sampling.ranking import Float32, prefixes
from engine.types import TokenLogprob


def token_logprobs(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """Report each row's token and its likeliest alternatives, the best first, ties by id.

    logits: fp32 [n, V], finite; tokens: the chosen id of each row; counts: how many alternatives each
    row wants (capped at V). log_softmax over the last dimension gives a row the same bits whatever
    stands beside it, and alternatives are ranked by logit, so the greedy token leads them.
    """
    values = torch.log_softmax(logits, dim=-1).numpy()
    rows = logits.numpy()
    return [
        _one(row, value, token, count)
        for row, value, token, count in zip(rows, values, tokens, counts, strict=True)
    ]


def _one(row: Float32, value: Float32, token: int, count: int) -> TokenLogprob:
    top: tuple[tuple[int, float], ...] = ()
    count = min(count, len(row))
    if count > 0:
        ids = next(ids for ids in prefixes(row, float(row.max())) if len(ids) >= count)[:count]
        top = tuple(zip(ids.tolist(), value[ids].tolist(), strict=True))
    return TokenLogprob(token, float(value[token]), top)
