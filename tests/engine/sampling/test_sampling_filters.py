"""The filters equal their plain definition, however little of the order was looked at."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engine.plan import SampleRow
from engine.sampling import ranking
from engine.sampling.cdf import choose
from engine.sampling.random import uniform
from engine.sampling.sampler import Sampler
from engine.types import SamplingParams


def naive(
    logits: np.ndarray, params: SamplingParams, u: float, bound: float = math.inf
) -> tuple[int, list[int]]:
    """Sample by the definition, one token at a time; gives the token and all that were kept."""
    scaled = torch.from_numpy((logits - logits.max()) / np.float32(params.temperature))
    probs = [float(p) for p in torch.softmax(scaled[None], dim=-1)[0]]
    kept = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    if params.top_k > 0:
        kept = kept[: params.top_k]
    if params.top_p < 1.0:
        mass = total(kept, probs)
        nucleus, reached = [], 0.0
        for token in kept:
            nucleus.append(token)
            reached += probs[token]
            if reached >= params.top_p * mass:
                break
        kept = nucleus
    floor = params.min_p * probs[kept[0]]
    for place, token in enumerate(kept):
        if probs[token] < floor or (probs[token] == 0 or -math.log2(probs[token]) > max(bound, 0.0)):
            kept = kept[: max(place, 1)]
            break
    if params.typical_p < 1.0:
        kept = typical(kept, probs, params.typical_p)
        mass = sum(probs[token] for token in kept)
    else:
        mass = total(kept, probs)
    target, reached = u * mass, 0.0
    for token in kept:
        reached += probs[token]
        if reached > target:
            return token, kept
    return max((t for t in kept if probs[t] > 0), key=kept.index), kept


def typical(kept: list[int], probs: list[float], share: float) -> list[int]:
    """Of the kept tokens, the fewest of typical surprise that have the share of their mass."""
    mass, mean = total(kept, probs), 0.0
    for token in sorted(kept) if len(kept) == len(probs) else kept:
        mean -= probs[token] * float(np.log(probs[token])) if probs[token] > 0 else 0.0
    mean /= mass
    distance = {t: abs(-float(np.log(probs[t])) - mean) if probs[t] > 0 else math.inf for t in kept}
    chosen, reached = [], 0.0
    for token in sorted(kept, key=distance.__getitem__):
        chosen.append(token)
        reached += probs[token]
        if reached >= share * mass:
            break
    return sorted(chosen, key=kept.index)


def total(kept: list[int], probs: list[float]) -> float:
    """The mass of what was kept; of everything it is 1."""
    if len(kept) == len(probs):
        return 1.0
    mass = 0.0
    for token in kept:
        mass += probs[token]
    return mass


def grains(seed: int, vocab: int, spread: float, step: float) -> np.ndarray:
    noise = np.random.default_rng(seed).standard_normal(vocab) * spread
    return (np.round(noise / step) * step if step else noise).astype(np.float32)


probability = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0, 0.5, 0.9, 0.999999]))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    vocab=st.sampled_from([1, 2, 7, 64, 300]),
    spread=st.sampled_from([0.0, 0.1, 1.0, 4.0, 30.0]),
    step=st.sampled_from([0.0, 0.25, 3.0]),
    noise=st.integers(0, 2**20),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([1e-6, 0.3, 1.0, 2.0, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 299, 300, 1000]),
    top_p=probability,
    min_p=probability,
    typical_p=st.one_of(st.just(1.0), probability),
    bound=st.none() | st.floats(-1, 12),
)
@example(300, 4.0, 0.25, 0, 0, 1.0, 0, 1.0, 1.0, 1.0, None)
@example(300, 4.0, 0.25, 0, 0, 1.0, 0, 0.0, 0.0, 0.0, 0.0)
@example(300, 0.0, 0.0, 0, 0, 1.0, 40, 0.5, 1.0, 1.0, None)
def test_sampling_equals_the_definition(
    vocab, spread, step, noise, seed, temperature, top_k, top_p, min_p, typical_p, bound
):
    logits = grains(noise, vocab, spread, step)
    params = SamplingParams(
        max_tokens=1,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        mirostat_target=0.0 if bound is None else 4.0,
    )
    token, kept = naive(logits, params, uniform(seed, 0, 0, 5), math.inf if bound is None else bound)
    row = SampleRow(0, params, seed, 0, 0, 5, bound=bound)
    assert Sampler(vocab).sample(torch.from_numpy(logits)[None], [row]).tokens == [token]
    assert token in kept


FILTERS = (
    {},
    {"top_p": 0.5},
    {"top_p": 0.97},
    {"top_k": 50},
    {"top_k": 3000, "top_p": 0.9},
    {"min_p": 0.02},
    {"min_p": 1e-7},
    {"top_k": 500, "top_p": 0.999, "min_p": 1e-4},
    {"typical_p": 0.2},
    {"typical_p": 0.9},
    {"typical_p": 0.99, "top_p": 0.95},
    {"mirostat_target": 40.0},
    {"mirostat_target": 300.0, "typical_p": 0.6},
)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("filters", FILTERS)
def test_a_short_look_finds_the_same_token_as_sorting_everything(temperature, filters, monkeypatch):
    vocab = 4096
    logits = torch.from_numpy(np.stack([grains(s, vocab, 3.0, 0.125) for s in range(4)]))
    params = SamplingParams(max_tokens=1, temperature=temperature, **filters)
    draws = [[SampleRow(0, params, d, 0, 0, j) for j in range(4)] for d in range(8)]
    short = [Sampler(vocab).sample(logits, rows).tokens for rows in draws]
    monkeypatch.setattr(ranking, "_DEPTHS", ())
    assert [Sampler(vocab).sample(logits, rows).tokens for rows in draws] == short


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.floats(-(2.0**100), 2.0**100, width=32) | st.sampled_from([0.0, -0.0, 1.0]),
        min_size=1,
        max_size=200,
    ),
    st.floats(0, 50),
)
def test_leaders_are_a_prefix_of_the_stable_order(values, depth):
    row = np.array(values, dtype=np.float32)
    order = sorted(range(len(values)), key=lambda i: (-float(row[i]), i))
    found = ranking.leaders(row, float(row.max()) - depth).tolist()
    assert found == order[: len(found)]
    assert len(found) == int((row >= np.float32(float(row.max()) - depth)).sum())
    assert list(ranking.prefixes(row, float(row.max())))[-1].tolist() == order


def test_top_p_keeps_the_token_that_crosses_the_share():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125]]))
    seen = {}
    for top_p in (0.4, 0.6, 0.8, 1.0):
        params = SamplingParams(max_tokens=1, top_p=top_p)
        rows = [SampleRow(0, params, 11, 0, 0, position) for position in range(300)]
        seen[top_p] = set(Sampler(4).sample(logits.expand(300, 4).contiguous(), rows)[0])
    assert seen == {0.4: {0}, 0.6: {0, 1}, 0.8: {0, 1, 2}, 1.0: {0, 1, 2, 3}}


def test_min_p_of_one_keeps_only_the_equals_of_the_best():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.999]]).expand(200, 4).contiguous()
    params = SamplingParams(max_tokens=1, min_p=1.0)
    rows = [SampleRow(0, params, 12, 0, 0, position) for position in range(200)]
    assert set(Sampler(4).sample(logits, rows)[0]) == {1, 2}


def test_a_heavy_tail_that_min_p_cuts_off_far_down_weighs_nothing():
    """The cut lies below the first look at the order, and the tail beyond it holds a third of the mass."""
    logits = np.full(8192, -9.5, dtype=np.float32)
    logits[[5, 4000]] = 0.0
    logits[100:150] = -8.0
    params = SamplingParams(max_tokens=1, min_p=2e-4)
    probs = torch.softmax(torch.from_numpy(logits)[None], dim=-1)[0].numpy()
    assert probs[probs < 2e-4 * probs.max()].sum() > 0.2
    for u in np.linspace(0, 1, 20, endpoint=False).tolist():
        assert choose(logits, probs, 0.0, params, u) == naive(logits, params, u)[0]


def kept_of(probs: list[float], **params) -> set[int]:
    """The tokens that 300 draws give."""
    logits = torch.log(torch.tensor([probs])).expand(300, len(probs)).contiguous()
    rows = [SampleRow(0, SamplingParams(max_tokens=1, **params), 13, 0, 0, j) for j in range(300)]
    return set(Sampler(len(probs)).sample(logits, rows).tokens)


def test_typical_p_leaves_out_a_likeliest_token_that_says_too_little():
    """Entropy 2.05 nats; surprise 0.92 of the likeliest and 2.81 of the others, which are nearer."""
    probs = [0.4] + [0.06] * 10
    assert kept_of(probs, typical_p=0.5) == set(range(1, 10))
    assert kept_of(probs, typical_p=0.55) == set(range(1, 11))
    assert kept_of(probs, typical_p=0.65) == set(range(11))
    assert kept_of(probs, typical_p=0.0) == {1}


def test_typical_p_keeps_the_likeliest_token_where_that_is_typical():
    """Entropy 1.23 nats; surprise 0.51 of the likeliest and 2.30 of the others."""
    probs = [0.6] + [0.1] * 4
    assert kept_of(probs, typical_p=0.5) == {0}
    assert kept_of(probs, typical_p=0.65) == {0, 1}


def test_typical_p_takes_its_entropy_from_what_the_other_filters_left():
    """Of all, the likeliest says too little; of the likeliest two it is the more typical."""
    probs = [0.4] + [0.06] * 10
    assert kept_of(probs, typical_p=0.5, top_k=2) == {0}


def test_of_equally_typical_tokens_the_first_are_kept():
    kept = kept_of([1 / 256] * 256, typical_p=0.125)
    assert len(kept) > 20
    assert kept <= set(range(32))


def test_typical_p_of_tokens_without_any_probability_keeps_none_of_them():
    logits = np.array([-500.0, 0.0, -500.0, 0.0, -500.0], dtype=np.float32)
    rows = [SampleRow(0, SamplingParams(max_tokens=1, typical_p=0.9), 14, 0, 0, j) for j in range(40)]
    tokens = Sampler(5).sample(torch.from_numpy(logits).expand(40, 5).contiguous(), rows).tokens
    assert set(tokens) == {1, 3}


@pytest.mark.parametrize(("u", "token"), [(0.0, 0), (0.25, 1), (0.5, 2), (0.75, 3), (1 - 2.0**-53, 3)])
def test_each_token_owns_the_half_open_stretch_of_its_mass(u, token):
    logits, probs = np.zeros(4, dtype=np.float32), np.full(4, 0.25, dtype=np.float32)
    assert choose(logits, probs, 0.0, SamplingParams(max_tokens=1), u) == token
