"""Mirostat in its second form (Basu, Ramachandran, Keskar and Varshney 2020): text of a wanted perplexity.

A token's surprise is -log2 of its probability under the temperature, before anything is cut: the mean of
that is the log of the text's perplexity. Tokens of more surprise than a bound are cut, and after each token
the bound moves against the difference of its surprise from the target.
"""

from __future__ import annotations

import math

from engine.types import SamplingParams


def bound_before(params: SamplingParams, bound: float | None) -> float | None:
    """The bound, in bits, that the next token obeys: None where mirostat is off."""
    if params.mirostat_target <= 0.0:
        return None
    return 2.0 * _target(params) if bound is None else bound


def least_probability(bound: float) -> float:
    """The probability of a token as surprising as the bound. A bound below 0 cuts as much as 0 does."""
    return float(2.0 ** -max(bound, 0.0))


def bound_after(params: SamplingParams, bound: float, prob: float) -> float:
    """The bound for the token after one of probability `prob`, in (0, 1]."""
    return bound - params.mirostat_lr * (-math.log2(prob) - _target(params))


def _target(params: SamplingParams) -> float:
    return math.log2(max(params.mirostat_target, 1.0))
