"""Mirostat steers the perplexity of what is drawn to its target."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from engine.sampling.sampler import Sampler
from tests.engine.sampling.samples import only, row

VOCAB = 3000


def zipf(n: int) -> torch.Tensor:
    """Probabilities that fall with the rank: 1.8 bits of surprise at the first, 5.7 in the mean."""
    return (-1.3 * torch.log(torch.arange(1, VOCAB + 1, dtype=torch.float32))).expand(n, VOCAB).contiguous()


def surprises(sequences: int, steps: int, **params) -> np.ndarray:
    """Surprise in bits of every drawn token, [steps, sequences]: each sequence follows its own bound."""
    logits = zipf(sequences)
    bits = -torch.log_softmax(logits[0].double() / params.get("temperature", 1.0), 0).numpy() / math.log(2)
    bounds: list[float | None] = [None] * sequences
    seen = []
    for step in range(steps):
        rows = [row(step, seed=j, bound=bounds[j], **params) for j in range(sequences)]
        drawn = Sampler(VOCAB).sample(logits, rows)
        bounds = drawn.bounds
        seen.append(bits[drawn.tokens])
    return np.array(seen)


@pytest.mark.parametrize("target", [5.0, 12.0, 25.0])
def test_the_mean_surprise_comes_to_its_target(target):
    settled = surprises(16, 160, mirostat_target=target, mirostat_lr=0.3)[60:]
    assert settled.mean() == pytest.approx(math.log2(target), rel=0.03)


def test_surprise_is_that_under_the_temperature():
    settled = surprises(16, 160, mirostat_target=30.0, mirostat_lr=0.3, temperature=1.5)[60:]
    assert settled.mean() == pytest.approx(math.log2(30.0), rel=0.03)


def test_a_faster_rate_follows_sooner():
    first = {rate: surprises(16, 12, mirostat_target=4.0, mirostat_lr=rate).mean() for rate in (0.0, 0.5)}
    assert abs(first[0.5] - 2.0) < abs(first[0.0] - 2.0)


def test_the_bound_starts_at_twice_the_target_and_moves_against_the_error():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25]]))
    params = {"mirostat_target": 4.0, "mirostat_lr": 0.3}
    for position in range(8):
        drawn = Sampler(3).sample(logits, [row(position, **params)])
        surprise = 1.0 if drawn.tokens == [0] else 2.0
        assert drawn.bounds[0] == pytest.approx(4.0 - 0.3 * (surprise - 2.0), abs=1e-6)
        later = Sampler(3).sample(logits, [row(position, **params, bound=2.5)])
        assert later.bounds[0] == pytest.approx(2.5 - 0.3 * (surprise - 2.0), abs=1e-6)


def test_no_token_is_more_surprising_than_the_bound():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125]])).expand(200, 4).contiguous()
    seen = {}
    for bound in (-5.0, 0.5, 1.5, 2.5, 3.5, 5000.0):
        rows = [row(j, mirostat_target=4.0, bound=bound) for j in range(200)]
        seen[bound] = set(Sampler(4).sample(logits, rows).tokens)
    every = {0, 1, 2, 3}
    assert seen == {-5.0: {0}, 0.5: {0}, 1.5: {0}, 2.5: {0, 1}, 3.5: every, 5000.0: every}


def test_a_target_of_one_or_less_takes_the_likeliest():
    for target in (1e-9, 0.5, 1.0):
        assert surprises(4, 10, mirostat_target=target).max() < 2.0  # the likeliest token's


def test_bounds_belong_to_rows_that_draw_with_mirostat():
    rows = [
        row(0),
        row(0, mirostat_target=8.0),
        row(0, mirostat_target=8.0, temperature=0.0),
        row(0, mirostat_target=8.0, constraint=only(vocab=VOCAB)),
        row(0, mirostat_target=8.0, constraint=only(5, 6, vocab=VOCAB)),
    ]
    bounds = Sampler(VOCAB).sample(zipf(5), rows).bounds
    assert [bound is None for bound in bounds] == [True, False, True, True, False]


def test_surprise_under_a_constraint_is_among_the_allowed():
    """One allowed token surprises nobody, however unlikely it was."""
    drawn = Sampler(VOCAB).sample(zipf(1), [row(0, mirostat_target=8.0, constraint=only(2999, vocab=VOCAB))])
    assert drawn.tokens == [2999]
    assert drawn.bounds[0] == pytest.approx(6.0 + 0.1 * 3.0)
