"""Tokens of one row in order of likelihood, without sorting the vocabulary.

The order is total: descending raw logit, ties by ascending id. Whatever lies at or above a floor is a
prefix of it, ties included, so a short prefix and the full order agree wherever both reach.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

# How far below the top logit (in units of the temperature) the prefixes reach before all is sorted.
# Text leaves some percent of its mass below exp(-7) of the likeliest token, and next to none below
# exp(-13); there are tens of tokens above the first line and thousands above the second.
_DEPTHS = (7.0, 13.0)
_LOWEST = float(np.finfo(np.float32).min)


def prefixes(row: Float32, top: float, scale: float = 1.0) -> Iterator[Ids]:
    """Yield ever longer prefixes of the order of `row` (fp32 [V], finite), the last of them whole.

    `top` is the row's largest logit, `scale` the temperature.
    """
    for depth in _DEPTHS:
        ids = leaders(row, top - depth * scale)
        yield ids
        if len(ids) == len(row):
            return
    yield leaders(row, _LOWEST)


def leaders(row: Float32, floor: float) -> Ids:
    """Give the ids whose logit is at least `floor`, the likeliest first, ties by id."""
    ids = np.flatnonzero(row >= np.float32(max(floor, _LOWEST)))
    # One integer per token, ascending where the logit descends: logit bits above, id below. Such keys
    # are all different, so any sort gives the stable order, and integers sort several times faster.
    # Adding 0.0 turns -0.0, which equals 0.0, into it.
    bits = (row[ids] + np.float32(0.0)).view(np.int32)
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (~ascending).astype(np.int64) << 32 | ids
    keys.sort()
    return keys & 0xFFFFFFFF
