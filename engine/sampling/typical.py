"""Locally typical sampling (Meister, Pimentel, Wiher and Cotterell 2022).

Kept are the tokens whose surprise, -ln p, is nearest to its mean, the entropy: the fewest of them that
together have the share of the mass. Surprise rises along the order of likelihood, so they are a stretch of
it, and a prefix that reaches beyond that stretch finds the same tokens as the whole order.
"""

from __future__ import annotations

import numpy as np

from engine.sampling.ranking import Float64, Ids


def mean_surprise(probs: Float64, total: float) -> float:
    """Mean of -ln p over a distribution of mass `total`, in nats.

    Its entropy less ln(total), and so at the same distance from each -ln p as the entropy is from the
    surprise. A token of probability 0 adds nothing. The sum is sequential.
    """
    logs = np.log(probs, out=np.zeros_like(probs), where=probs > 0.0)
    return -float(np.cumsum(probs * logs)[-1]) / total


def typical_places(probs: Float64, kept: int, mean: float, share: float) -> Ids | None:
    """Places of the fewest tokens around `mean` whose mass reaches `share`, ascending.

    probs: of the first tokens in order of likelihood, out of `kept`. Of two tokens at one distance the
    likelier goes first. None if this prefix is too short to tell.
    """
    with np.errstate(divide="ignore"):
        distances = np.abs(-np.log(probs) - mean)
    order = np.argsort(distances, kind="stable")
    enough = int(np.searchsorted(np.cumsum(probs[order]), share, side="left")) + 1
    if len(probs) < kept:
        # Beyond the prefix surprise only rises: all there stand behind what is no farther than the last
        # token known, once that lies above the mean.
        settled = np.searchsorted(distances[order], distances[-1], side="right")
        if enough > settled or -np.log(probs[-1]) < mean:
            return None
    return np.sort(order[:enough])
