"""Random numbers that depend on a key alone: no state, no order, no neighbours.

Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers:
as easy as 1, 2, 3" (SC 2011). A token's number is a pure function of its seed and its place, so a
request draws the same one alone, batched, preempted and resumed.
"""

from __future__ import annotations

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_ROUNDS = 10


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Map a counter of four 32-bit words under a key of two to four random 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left = _MULTIPLIER_0 * c0
        right = _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & _MASK32, (left >> 32) ^ c3 ^ k1, left & _MASK32
        k0 = (k0 + _WEYL_0) & _MASK32
        k1 = (k1 + _WEYL_1) & _MASK32
    return c0, c1, c2, c3


def uniform(seed: int, prompt_index: int, choice_index: int, position: int) -> float:
    """Draw the number in [0, 1) that belongs to one output position of one choice of one prompt.

    53 random bits, so every value is a multiple of 2**-53 and 1.0 never comes. The seed counts modulo
    2**64 (negative ones are welcome), the indices modulo 2**32.
    """
    seed &= _MASK64
    counter = (position & _MASK32, choice_index & _MASK32, prompt_index & _MASK32, 0)
    high, low, _, _ = philox4x32(counter, (seed & _MASK32, seed >> 32))
    return float(((high << 32) | low) >> 11) * 2.0**-53
