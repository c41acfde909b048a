"""Inverse transform sampling over a row's tokens in order of likelihood, with truncation.

Every filter keeps a prefix of the order, so filters are lengths and nothing is masked or renormalised.
Order: temperature, top_k, top_p, min_p. top_p counts in shares of the mass that top_k left; min_p is
relative to the likeliest token, and at most 1. So at least one token always remains.
"""

from __future__ import annotations

import numpy as np

from engine.sampling.ranking import Float32, Float64, prefixes
from engine.types import SamplingParams


def choose(row: Float32, probs: Float32, top: float, params: SamplingParams, uniform: float) -> int:
    """Pick the token of one row at temperature > 0.

    row: fp32 [V], raw logits, all finite; top: the largest of them. probs: fp32 [V], softmax of the row
    under the temperature. uniform: in [0, 1).
    """
    for ids in prefixes(row, top, params.temperature):
        picked = _pick(probs[ids].astype(np.float64), len(row), params, uniform)
        if picked is not None:
            return int(ids[picked])
    raise AssertionError("the whole order always holds the token")


def _pick(probs: Float64, vocab_size: int, params: SamplingParams, uniform: float) -> int | None:
    """Find the place of the token within a prefix of the order, or None if that lies beyond it.

    A cumulative sum runs from the front, so the answer has the same bits for every prefix that holds it.
    """
    mass = np.cumsum(probs)
    kept = _kept(probs, mass, vocab_size, params)
    if kept is None:
        return None
    # An uncut distribution has mass 1 by definition: its sum would need the whole order.
    total = 1.0 if kept == vocab_size else float(mass[kept - 1])
    inside = mass[:kept]
    place = int(np.searchsorted(inside, uniform * total, side="right"))
    if place < len(inside):
        return place
    if len(inside) < kept:
        return None
    # Rounding left the sum below the target: the last token that adds anything.
    return int(np.searchsorted(inside, inside[-1], side="left"))


def _kept(probs: Float64, mass: Float64, vocab_size: int, params: SamplingParams) -> int | None:
    """Count the tokens that the filters keep, or None if this prefix is too short to tell."""
    known = len(probs)
    whole = known == vocab_size
    kept = min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size
    if known < kept and params.top_k > 0:
        return None
    if params.top_p < 1.0:
        # The fewest tokens whose mass reaches the share.
        reached = mass[: min(kept, known)]
        share = params.top_p * (1.0 if kept == vocab_size else float(mass[kept - 1]))
        enough = int(np.searchsorted(reached, share, side="left")) + 1
        if enough > known and not whole:
            return None
        kept = min(kept, enough)
    if params.min_p > 0.0:
        below = probs[: min(kept, known)] < params.min_p * probs[0]
        first = int(np.argmax(below)) if below.any() else kept
        if first > known:
            return None
        kept = min(kept, first)
    return kept
