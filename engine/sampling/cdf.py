"""Inverse transform sampling over a row's tokens in order of likelihood, with truncation.

Order: temperature, top_k, top_p, min_p, mirostat, typical_p. All but the last keep a prefix of the order,
so they are lengths and nothing is masked or renormalised; typical_p goes last because it takes a stretch out
of what they left. top_p counts in shares of the mass that top_k left; min_p is relative to the likeliest
token, and at most 1; mirostat's bound is a least probability, before any cut. At least one token always
remains.
"""

from __future__ import annotations

import numpy as np

from engine.sampling.ranking import Float32, Float64, prefixes
from engine.sampling.typical import mean_surprise, typical_places
from engine.types import SamplingParams


def choose(
    row: Float32, probs: Float32, top: float, params: SamplingParams, uniform: float, least: float = 0.0
) -> int:
    """Pick the token of one row at temperature > 0.

    row: fp32 [V], logits, all finite; top: the largest of them. probs: fp32 [V], softmax of the row under
    the temperature. uniform: in [0, 1). least: tokens less probable are cut (all but the likeliest).
    """
    for ids in prefixes(row, top, params.temperature):
        picked = _pick(probs[ids].astype(np.float64), probs, params, uniform, least)
        if picked is not None:
            return int(ids[picked])
    raise AssertionError("the whole order always holds the token")


def _pick(
    probs: Float64, everything: Float32, params: SamplingParams, uniform: float, least: float
) -> int | None:
    """Find the place of the token within a prefix of the order, or None if that lies beyond it.

    probs: of the prefix; everything: of all tokens, by id. A cumulative sum runs from the front, so the
    answer has the same bits for every prefix that holds it.
    """
    vocab_size = len(everything)
    mass = np.cumsum(probs)
    kept = _kept(probs, mass, vocab_size, params, least)
    if kept is None:
        return None
    # An uncut distribution has mass 1 by definition: its sum would need the whole order.
    total = 1.0 if kept == vocab_size else float(mass[kept - 1])
    inside = mass[:kept]
    if params.typical_p < 1.0:
        mean = mean_surprise(everything.astype(np.float64) if kept == vocab_size else probs[:kept], total)
        places = typical_places(probs[:kept], kept, mean, params.typical_p * total)
        if places is None:
            return None
        inside = np.cumsum(probs[places])
        return int(places[_within(inside, uniform * float(inside[-1]))])
    if uniform * total >= inside[-1] and len(inside) < kept:
        return None
    return _within(inside, uniform * total)


def _within(inside: Float64, target: float) -> int:
    """The place whose stretch of the cumulative mass holds the target."""
    place = int(np.searchsorted(inside, target, side="right"))
    if place < len(inside):
        return place
    # Rounding left the sum below the target: the last token that adds anything.
    return int(np.searchsorted(inside, inside[-1], side="left"))


def _kept(probs: Float64, mass: Float64, vocab_size: int, params: SamplingParams, least: float) -> int | None:
    """Count the tokens that the prefix filters keep, or None if this prefix is too short to tell."""
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
    floor = max(least, params.min_p * float(probs[0])) if params.min_p > 0.0 else least
    if floor > 0.0:
        below = probs[: min(kept, known)] < floor
        first = int(np.argmax(below)) if below.any() else kept
        if first > known:
            return None
        kept = min(kept, max(first, 1))
    return kept
