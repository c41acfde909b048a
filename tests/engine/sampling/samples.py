"""Rows, logits and constraints for the sampler's tests."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from engine.plan import Past, SampleRow
from engine.types import Constraint, SamplingParams

V = 49152


def row(
    position: int = 0,
    *,
    seed: int = 0,
    prompt: int = 0,
    choice: int = 0,
    before: Sequence[int] = (),
    generated: Sequence[int] = (),
    constraint: Constraint | None = None,
    bound: float | None = None,
    **params,
) -> SampleRow:
    """A sample at an output position, after the prompt `before` and the tokens `generated`."""
    past = Past(before)
    for token in generated:
        past.append(token)
    return SampleRow(
        0,
        SamplingParams(max_tokens=1, **params),
        seed,
        prompt,
        choice,
        position,
        past,
        constraint,
        bound,
    )


def text_like(n: int, *, seed: int = 0, vocab: int = V) -> torch.Tensor:
    """Logits as a language model gives them: a steep head, a long tail, bf16 grains (so ties abound)."""
    return _text_like(n, seed, vocab).clone()


@functools.lru_cache(maxsize=4)
def _text_like(n: int, seed: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    base = 15 - 1.6 * torch.log(torch.arange(1, vocab + 1, dtype=torch.float32))
    rows = [
        base[torch.randperm(vocab, generator=generator)] + 0.5 * torch.randn(vocab, generator=generator)
        for _ in range(n)
    ]
    return torch.stack(rows).bfloat16().float() if rows else torch.empty(0, vocab)


def bits(tokens: Iterable[int], vocab: int) -> bytes:
    """A mask of these tokens alone."""
    mask = np.zeros(vocab, np.bool_)
    mask[list(tokens)] = True
    return np.packbits(mask, bitorder="little").tobytes()


class Grammar:
    """A constraint that says what may follow by a function of the tokens so far."""

    source = "a function"

    def __init__(self, mask: Callable[[Sequence[int]], bytes]) -> None:
        self.mask = mask

    def complete(self, generated: Sequence[int]) -> bool:
        return False


def only(*tokens: int, vocab: int = V) -> Grammar:
    """The same tokens at every position."""
    mask = bits(tokens, vocab)
    return Grammar(lambda generated: mask)
