"""Constrained rows choose among the allowed tokens; their failures are theirs alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConstraintFailed
from engine.sampling.sampler import Sampler
from tests.engine.sampling.samples import Grammar, V, bits, only, row, text_like


@settings(max_examples=60, deadline=None)
@given(
    free=st.sets(st.integers(0, 99), min_size=1),
    seed=st.integers(0, 2**20),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    filters=st.sampled_from([{}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"typical_p": 0.4}]),
)
def test_a_mask_is_as_if_the_vocabulary_held_no_other_token(free, seed, temperature, filters):
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(seed))
    ids = sorted(free)
    asked = {"seed": seed, "temperature": temperature, **filters}
    masked = Sampler(100).sample(logits, [row(constraint=only(*free, vocab=100), **asked)])
    small = Sampler(len(ids)).sample(logits[:, ids].contiguous(), [row(**asked)])
    assert masked.tokens == [ids[small.tokens[0]]]
    assert not masked.errors


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("last", [0, 7, 8, 24_000, V - 1])
def test_a_mask_of_all_but_one_token_leaves_that_one(last, temperature):
    rows = [row(j, temperature=temperature, constraint=only(last), logprobs=0) for j in range(3)]
    drawn = Sampler(V).sample(text_like(3), rows)
    assert drawn.tokens == [last] * 3
    assert all(report is not None and report.token_id == last for report in drawn.logprobs)
    assert drawn.finite.all()


def test_a_mask_of_all_tokens_changes_no_bit():
    logits = text_like(12)
    kinds = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "logprobs": 2})
    every = only(*range(V))
    plain = Sampler(V).sample(logits, [row(j, **kinds[j % 3]) for j in range(12)])
    masked = Sampler(V).sample(logits, [row(j, **kinds[j % 3], constraint=every) for j in range(12)])
    assert (masked.tokens, masked.logprobs) == (plain.tokens, plain.logprobs)


def test_ties_among_the_allowed_go_to_the_lowest_id():
    drawn = Sampler(V).sample(torch.zeros(1, V), [row(temperature=0.0, constraint=only(900, 31, 40000))])
    assert drawn.tokens == [31]


@pytest.mark.parametrize("vocab", [1, 7, 8, 9, 63, 65])
def test_bits_beyond_the_vocabulary_and_missing_ones_allow_nothing(vocab):
    logits = torch.arange(vocab, dtype=torch.float32)[None]
    long = Grammar(lambda generated: bits([0, *range(vocab, vocab + 40)], vocab + 40))
    short = Grammar(lambda generated: b"\x01")
    rows = [row(temperature=0.0, constraint=long), row(temperature=0.0, constraint=short)]
    assert Sampler(vocab).sample(logits.expand(2, vocab).contiguous(), rows).tokens == [0, 0]


def test_a_bias_and_penalties_choose_among_the_allowed_and_open_nothing():
    logits = torch.tensor([[9.0, 1.0, 2.0, 0.0]])
    allowed = only(1, 2, vocab=4)
    biased = row(temperature=0.0, constraint=allowed, logit_bias=((0, 100.0), (1, 100.0)))
    banned = row(temperature=0.0, constraint=allowed, logit_bias=((1, -100.0), (2, -100.0)))
    penalised = row(temperature=0.0, constraint=allowed, generated=[2, 2], frequency_penalty=2.0)
    assert Sampler(4).sample(logits.expand(3, 4).contiguous(), [biased, banned, penalised]).tokens == [
        1,
        2,
        1,
    ]


def test_a_constraint_is_asked_with_the_tokens_so_far_and_again_by_a_repeated_step():
    def after(generated: Sequence[int]) -> bytes:
        return bits([(generated[-1] + 1) % 5], 5)

    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    rows = [row(j, constraint=Grammar(after), generated=[j, last]) for j, last in enumerate((0, 3, 4))]
    for _ in range(2):
        assert Sampler(5).sample(logits, rows).tokens == [1, 4, 0]


def fails(generated: Sequence[int]) -> bytes:
    raise ConstraintFailed("the grammar has become too complex")


def breaks(generated: Sequence[int]) -> bytes:
    raise IndexError("no such state")


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (fails, "the grammar has become too complex"),
        (breaks, "the grammar failed: no such state"),
        (lambda generated: bytes(V // 8), "no token may follow"),
        (lambda generated: b"", "no token may follow"),
        (lambda generated: bits([V, V + 3], V + 8), "no token may follow"),
    ],
)
def test_a_constraint_that_fails_ends_its_own_row_and_the_step_goes_on(mask, message):
    logits = text_like(4)
    plain = [row(0, temperature=0.0), row(1, logprobs=2), row(2), row(3, constraint=only(5, 6))]
    good = Sampler(V).sample(logits, plain)
    bad = row(1, constraint=Grammar(mask), logprobs=2)
    drawn = Sampler(V).sample(logits, [plain[0], bad, *plain[2:]])
    assert list(drawn.errors) == [1]
    assert message in drawn.errors[1]
    assert drawn.logprobs[1] is None
    assert drawn.finite.all()
    assert [drawn.tokens[j] for j in (0, 2, 3)] == [good.tokens[j] for j in (0, 2, 3)]


def test_constrained_and_free_rows_share_a_batch():
    """O067: no constrained row is ever drawn freely, whoever stands beside it."""
    logits = text_like(32)
    digits = only(*range(10, 20))
    kinds = [
        {"temperature": 1.0},
        {"temperature": 1.0, "constraint": digits},
        {"temperature": 0.0},
        {"temperature": 0.0, "constraint": digits, "repetition_penalty": 1.2, "generated": [12]},
    ]
    drawn = Sampler(V).sample(logits, [row(j, **kinds[j % 4]) for j in range(32)])
    free = Sampler(V).sample(logits, [row(j, **kinds[j % 4 // 2 * 2]) for j in range(32)])
    for j, token in enumerate(drawn.tokens):
        if j % 2:
            assert 10 <= token < 20
        else:
            assert token == free.tokens[j]


@pytest.mark.parametrize(
    "asked", [{"min_tokens": 9}, {"ignore_eos": True}, {"min_tokens": 9, "ignore_eos": True}]
)
def test_a_grammar_at_its_end_ends_whatever_else_was_asked(asked):
    logits = torch.tensor([[5.0, 0.0, 4.0]])
    ended = row(temperature=0.0, constraint=only(1, vocab=3), stop_token_ids=(1,), **asked)
    assert Sampler(3).sample(logits, [ended]).tokens == [1]


def test_an_end_that_a_grammar_only_permits_waits_for_the_fewest_tokens():
    logits = torch.tensor([[5.0, 9.0, 4.0]] * 2)
    rows = [
        row(position, temperature=0.0, constraint=only(1, 2, vocab=3), stop_token_ids=(1,), min_tokens=3)
        for position in (2, 3)
    ]
    assert Sampler(3).sample(logits, rows).tokens == [2, 1]


def test_draws_among_the_allowed_follow_their_share():
    logits = torch.tensor([[3.0, 1.0, 0.0, 2.0, 8.0]]).expand(3000, 5).contiguous()
    rows = [row(j, seed=4, constraint=only(1, 2, 3, vocab=5)) for j in range(3000)]
    observed = np.bincount(Sampler(5).sample(logits, rows).tokens, minlength=5)
    expected = torch.softmax(logits[0, 1:4].double(), dim=0).numpy() * 3000
    assert observed[[0, 4]].sum() == 0
    assert float(((observed[1:4] - expected) ** 2 / expected).sum()) < 13.8  # 2 degrees: about 1 in 1,000
