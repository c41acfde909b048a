"""A row's token is its own affair: neighbours, batch size and threads change no bit of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import ConstraintFailed
from engine.sampling.sampler import Drawn, Sampler
from engine.types import TokenLogprob
from tests.engine.sampling.samples import Grammar, V, bits, only, row, text_like


@pytest.fixture(params=[1, 2])
def threads(request) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def refuse(generated: Sequence[int]) -> bytes:
    raise ConstraintFailed("the grammar is lost")


TOKENS = tuple(range(0, V, 3))
MIXED = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9, "logprobs": 0},
    {"temperature": 1.0, "top_k": 40, "logprobs": 20},
    {"temperature": 1.3, "min_p": 0.05},
    {"temperature": 2.0, "top_p": 0.99},
    {"temperature": 1.0, "top_k": 100, "top_p": 0.8, "min_p": 0.01, "logprobs": 1},
    {"temperature": 1.0, "typical_p": 0.9},
    {"temperature": 1.5, "typical_p": 0.5, "top_p": 0.95, "logprobs": 2},
    {"temperature": 1.0, "mirostat_target": 30.0},
    {"temperature": 1.2, "mirostat_target": 5.0, "bound": 3.7, "top_k": 400},
    {"temperature": 0.0, "logit_bias": tuple((i, -30.0) for i in range(0, V, 160)), "logprobs": 2},
    {"temperature": 1.0, "repetition_penalty": 1.4, "before": TOKENS, "generated": [5, 5, 7]},
    {"temperature": 0.0, "repetition_penalty": 0.7, "before": TOKENS[::50], "generated": TOKENS[1::50]},
    {"temperature": 1.0, "frequency_penalty": 0.6, "presence_penalty": -1.0, "generated": TOKENS * 2},
    {"temperature": 0.8, "min_tokens": 100, "stop_token_ids": tuple(range(0, V, 7))},
    {"temperature": 1.0, "constraint": Grammar(lambda generated: bits(TOKENS, V)), "logprobs": 3},
    {"temperature": 0.0, "constraint": only(31, 41, 59), "frequency_penalty": 2.0, "generated": [41] * 9},
    {"temperature": 1.0, "constraint": only(), "logprobs": 1},
    {"temperature": 0.0, "constraint": Grammar(refuse)},
    {"temperature": 1.0, "constraint": only(*TOKENS), "mirostat_target": 9.0, "typical_p": 0.8},
)

Outcome = tuple[int, TokenLogprob | None, float | None, str | None]


def outcome(drawn: Drawn, j: int) -> Outcome:
    return drawn.tokens[j], drawn.logprobs[j], drawn.bounds[j], drawn.errors.get(j)


@pytest.mark.parametrize("n", [1, 3, 17, 44])
def test_a_row_gets_the_same_bits_alone_and_in_any_company(n, threads):
    """O019: sampling adds no difference between a request alone and the same one in a batch."""
    logits = text_like(44)
    rows = [row(j, seed=j * 7919, prompt=j % 3, choice=j % 2, **MIXED[j % len(MIXED)]) for j in range(44)]
    sampler = Sampler(V)
    torch.set_num_threads(1)
    alone = [outcome(sampler.sample(logits[j : j + 1], rows[j : j + 1]), 0) for j in range(44)]
    torch.set_num_threads(threads)
    for start in range(0, 44, n):
        drawn = sampler.sample(logits[start : start + n], rows[start : start + n])
        assert [outcome(drawn, j) for j in range(len(drawn.tokens))] == alone[start : start + n]
        assert drawn.finite.all()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    order=st.lists(st.integers(0, 15), min_size=1, max_size=20),
    kinds=st.lists(st.sampled_from(MIXED), min_size=16, max_size=16),
    seed=st.integers(-(2**63), 2**64 - 1),
    threads=st.sampled_from([1, 2]),
)
def test_any_selection_of_rows_in_any_order_gives_each_its_own_bits(order, kinds, seed, threads):
    logits = text_like(16, seed=1)
    rows = [row(j, seed=seed, **kind) for j, kind in enumerate(kinds)]
    sampler = Sampler(V)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        drawn = sampler.sample(logits[order], [rows[j] for j in order])
        for place, j in enumerate(order):
            assert outcome(drawn, place) == outcome(sampler.sample(logits[j : j + 1], [rows[j]]), 0)
    finally:
        torch.set_num_threads(before)


def test_logits_may_be_a_view_into_a_padded_buffer():
    n = len(MIXED)
    buffer = torch.full((n, V + 64), torch.nan)
    logits = text_like(n)
    buffer[:, :V] = logits
    rows = [row(j, **kind) for j, kind in enumerate(MIXED)]
    ours, theirs = Sampler(V).sample(buffer[:, :V], rows), Sampler(V).sample(logits, rows)
    assert [outcome(ours, j) for j in range(n)] == [outcome(theirs, j) for j in range(n)]


def test_sampling_leaves_the_logits_as_they_were():
    logits = text_like(len(MIXED))
    before = logits.clone()
    Sampler(V).sample(logits, [row(j, **kind) for j, kind in enumerate(MIXED)])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("n", [1, 2, 17])
@pytest.mark.parametrize("ids", [(0, V - 1), (V // 2 - 1, V // 2), (24575, 24576, 40000), (V - 2, V - 1)])
def test_greedy_ties_go_to_the_lowest_id(n, ids, threads):
    logits = text_like(n, seed=2)
    logits[:, list(ids)] = 50.0
    assert Sampler(V).sample(logits, [row(temperature=0.0)] * n)[0] == [ids[0]] * n


def test_a_row_of_equals_and_signed_zeros_gives_id_zero(threads):
    logits = torch.zeros(2, V)
    logits[1, ::2] = -0.0
    assert Sampler(V).sample(logits, [row(temperature=0.0)] * 2)[0] == [0, 0]
    assert Sampler(V).sample(logits, [row(temperature=1.0, top_k=1)] * 2)[0] == [0, 0]


@pytest.mark.parametrize("temperature", [1e-6, 0.5, 1.0, 100.0])
def test_top_k_of_one_is_greedy(temperature):
    logits = text_like(16, seed=3)
    greedy = Sampler(V).sample(logits, [row(temperature=0.0)] * 16)[0]
    for narrow in ({"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-9}):
        rows = [row(j, temperature=temperature, **narrow) for j in range(16)]
        assert Sampler(V).sample(logits, rows)[0] == greedy


@pytest.mark.parametrize("temperature", [1e-50, 1e-45, 1e-30, 1e-6])
def test_a_temperature_next_to_zero_shares_the_draws_among_the_top_tokens(temperature):
    logits = text_like(1, seed=4).expand(40, V).contiguous()
    logits[:, [70, 40000]] = 20.0
    tokens = Sampler(V).sample(logits, [row(j, temperature=temperature) for j in range(40)])[0]
    assert set(tokens) == {70, 40000}


def test_a_very_high_temperature_makes_all_tokens_alike():
    rows = [row(j, temperature=1e6) for j in range(16)]
    tokens = Sampler(V).sample(text_like(16, seed=5), rows)[0]
    assert len(set(tokens)) == 16


def test_the_widest_finite_logits_overflow_nothing():
    big = float(torch.finfo(torch.float32).max)
    logits = torch.full((40, V), -big)
    logits[:, [77, 78]] = big
    rows = [row(j, temperature=1e-6 if j % 2 else 2.0, logprobs=2) for j in range(40)]
    tokens, logprobs, finite, *_ = Sampler(V).sample(logits, rows)
    assert set(tokens[::2]) == set(tokens[1::2]) == {77, 78}
    assert finite.all()
    half = pytest.approx(float(np.log(0.5)))
    assert [report.top for report in logprobs if report] == [((77, half), (78, half))] * 40


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, V // 2, V - 1])
def test_a_row_with_a_bad_logit_is_named_and_disturbs_no_other(poison, place):
    n = len(MIXED)
    logits = text_like(n, seed=6)
    rows = [row(j, **kind) for j, kind in enumerate(MIXED)]
    good = Sampler(V).sample(logits, rows)
    for victims in ([3], [0, n - 1], range(n)):
        spoilt = logits.clone()
        spoilt[list(victims), place] = poison
        drawn = Sampler(V).sample(spoilt, rows)
        for j in range(n):
            assert bool(drawn.finite[j]) == (j not in victims)
            assert outcome(drawn, j) == ((0, None, None, None) if j in victims else outcome(good, j))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_row_of_nothing_but_bad_logits_raises_nothing(poison):
    tokens, logprobs, finite, *_ = Sampler(V).sample(torch.full((1, V), poison), [row(logprobs=3)])
    assert (tokens, logprobs, finite.tolist()) == ([0], [None], [False])


def test_no_rows_give_no_tokens():
    tokens, logprobs, finite, *_ = Sampler(V).sample(torch.empty(0, V), [])
    assert (tokens, logprobs, finite.shape, finite.dtype) == ([], [], (0,), np.bool_)


def test_logits_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="logits are"):
        Sampler(V).sample(torch.zeros(2, V), [row()])
    with pytest.raises(ValueError, match="logits are"):
        Sampler(V).sample(torch.zeros(1, V + 1), [row()])


def test_each_part_of_the_key_changes_the_draw():
    logits = text_like(1, seed=8)
    base = {"seed": 1, "prompt": 1, "choice": 1}
    for part in base:
        ours = [Sampler(V).sample(logits, [row(p, **base)])[0] for p in range(20)]
        other = [Sampler(V).sample(logits, [row(p, **{**base, part: 2})])[0] for p in range(20)]
        assert ours != other


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63, 2**64 - 1])
def test_any_64_bit_seed_is_reproducible(seed):
    logits = text_like(4, seed=9)
    rows = [row(j, seed=seed) for j in range(4)]
    assert Sampler(V).sample(logits, rows)[0] == Sampler(V).sample(logits, rows)[0]


def test_samples_follow_the_distribution():
    vocab, draws = 24, 4000
    generator = torch.Generator().manual_seed(10)
    logits = torch.randn(1, vocab, generator=generator).expand(draws, vocab).contiguous()
    for temperature in (0.5, 1.0, 2.0):
        keys = itertools.product(range(40), range(100))
        rows = [row(position, seed=seed, temperature=temperature) for seed, position in keys]
        tokens = Sampler(vocab).sample(logits, rows)[0]
        probs = torch.softmax(logits[0].double() / temperature, dim=0).numpy()
        expected = probs * draws
        observed = np.bincount(tokens, minlength=vocab)
        likely = expected >= 5
        parts = [(observed[likely], expected[likely])]
        if not likely.all():
            parts.append((observed[~likely].sum(keepdims=True), expected[~likely].sum(keepdims=True)))
        chi_square = sum(float(((o - e) ** 2 / e).sum()) for o, e in parts)
        assert chi_square < 50  # 23 degrees of freedom: about 1 in 1,000


def test_filtered_samples_follow_the_renormalised_distribution():
    vocab, draws = 12, 4000
    logits = torch.linspace(2, -2, vocab).expand(draws, vocab).contiguous()
    rows = [row(position, seed=3, top_k=4) for position in range(draws)]
    observed = np.bincount(Sampler(vocab).sample(logits, rows)[0], minlength=vocab)
    expected = torch.softmax(logits[0, :4].double(), dim=0).numpy() * draws
    assert observed[4:].sum() == 0
    assert float(((observed[:4] - expected) ** 2 / expected).sum()) < 16.3  # 3 degrees of freedom
