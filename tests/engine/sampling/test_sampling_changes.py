"""Bias, penalties and forbidden tokens: what changes about the logits, and what never does."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.plan import Past, SampleRow
from engine.sampling.changes import changed
from engine.sampling.sampler import Sampler
from tests.engine.sampling.samples import V, only, row, text_like

SMALL = 12
token = st.integers(0, SMALL - 1)
LARGEST = float(np.finfo(np.float32).max)


def greedy(logits: list[float], **changes) -> int:
    return Sampler(len(logits)).sample(torch.tensor([logits]), [row(temperature=0.0, **changes)]).tokens[0]


def by_definition(
    logits: np.ndarray, sample: SampleRow, prompt: list[int], generated: list[int]
) -> list[float]:
    """The changes in their order, one token at a time, rounded to fp32 after each."""
    params = sample.params
    bias = dict(params.logit_bias)
    values = []
    for i, raw in enumerate(logits.tolist()):
        value = float(np.float32(raw) + np.float32(bias.get(i, 0.0)))
        if i in prompt or i in generated:
            penalty = params.repetition_penalty
            value = float(np.float32(value / penalty if value > 0 else value * penalty))
        if count := generated.count(i):
            value = float(np.float32(value - (params.frequency_penalty * count + params.presence_penalty)))
        values.append(value)
    return values


@settings(max_examples=100, deadline=None)
@given(
    logits=st.lists(st.floats(-60, 60, width=32), min_size=SMALL, max_size=SMALL),
    bias=st.dictionaries(token, st.floats(-100, 100)),
    prompt=st.lists(token, max_size=20),
    generated=st.lists(token, max_size=20),
    repetition=st.sampled_from([1.0, 0.5, 1.3, 2.0]),
    frequency=st.sampled_from([0.0, -2.0, 0.3, 2.0]),
    presence=st.sampled_from([0.0, -2.0, 0.7, 2.0]),
)
def test_changes_equal_the_definition(logits, bias, prompt, generated, repetition, frequency, presence):
    sample = row(
        before=tuple(prompt),
        generated=generated,
        logit_bias=tuple(bias.items()),
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        temperature=0.0,
    )
    raw = np.array(logits, np.float32)
    values = by_definition(raw, sample, prompt, generated)
    assert changed(raw, sample).tolist() == values
    drawn = Sampler(SMALL).sample(torch.from_numpy(raw)[None], [sample])
    assert drawn.tokens == [values.index(max(values))]


def test_a_past_counts_each_token_once_however_it_has_grown():
    past, tokens = Past((5, 3, 5, 9)), np.random.default_rng(0).integers(0, 40, 200).tolist()
    first = past.prompt_ids
    for length, token in enumerate(tokens):
        ids, counts = past.counted()
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == Counter(tokens[:length])
        assert past.generated == tokens[:length]
        past.append(token)
    assert first.tolist() == [3, 5, 9]
    assert past.prompt_ids is first, "a prompt is read once"


def test_the_frequency_penalty_counts_and_the_presence_penalty_does_not():
    logits = [3.0, 2.0, 1.0]
    assert greedy(logits, generated=[0], frequency_penalty=0.9) == 0
    assert greedy(logits, generated=[0, 0], frequency_penalty=0.9) == 1
    assert greedy(logits, generated=[0, 0, 0], presence_penalty=0.9) == 0
    assert greedy(logits, generated=[0, 1], presence_penalty=2.0) == 0  # both lose as much
    assert greedy(logits, generated=[0, 1, 1], presence_penalty=2.0, frequency_penalty=0.3) == 2
    assert greedy(logits, generated=[2, 2], frequency_penalty=-1.5) == 2  # below 0: once more


def test_only_the_repetition_penalty_looks_at_the_prompt():
    logits = [3.0, 2.0, -1.0]
    assert greedy(logits, before=(0,) * 9, frequency_penalty=2.0, presence_penalty=2.0) == 0
    assert greedy(logits, before=(0,), repetition_penalty=2.0) == 1
    assert greedy(logits, generated=[0], repetition_penalty=2.0) == 1
    assert (
        greedy(logits, before=(0,) * 9, generated=[0] * 9, repetition_penalty=1.4) == 0
    )  # once, not 18 times


def test_the_repetition_penalty_lowers_negative_logits_too():
    assert greedy([-1.0, -1.5], before=(0,), repetition_penalty=2.0) == 1
    assert greedy([-1.0, -1.5], before=(1,), repetition_penalty=0.5) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_of_100_forces_a_token_and_one_of_minus_100_bans_it(temperature):
    logits = text_like(20)
    worst, best = logits.argmin(-1).tolist(), logits.argmax(-1).tolist()
    forced = [row(j, temperature=temperature, logit_bias=((worst[j], 100.0),)) for j in range(20)]
    assert Sampler(V).sample(logits, forced).tokens == worst
    logits[:, 0] = 40.0
    banned = [row(j, temperature=temperature, logit_bias=((0, -100.0),)) for j in range(20)]
    tokens = Sampler(V).sample(logits, banned).tokens
    assert 0 not in tokens
    if temperature == 0.0:
        assert tokens == best


def test_a_ban_of_every_other_token_leaves_one():
    bias = tuple((i, -100.0) for i in range(V) if i != 777)
    rows = [row(j, temperature=1.0, logit_bias=bias) for j in range(2)]
    assert Sampler(V).sample(text_like(2), rows).tokens == [777, 777]


def test_a_shift_of_all_logits_changes_no_token():
    logits = text_like(8, vocab=300).round()
    plain = Sampler(300).sample(logits, [row(j) for j in range(8)])
    for shift in (-100.0, 64.0):
        bias = tuple((i, shift) for i in range(300))
        assert Sampler(300).sample(logits, [row(j, logit_bias=bias) for j in range(8)]).tokens == plain.tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "change",
    [
        {"logit_bias": ((0, 100.0), (1, -100.0))},
        {"repetition_penalty": 2.0},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 0.0},
        {"frequency_penalty": 1e39, "presence_penalty": -1e38},
        {"frequency_penalty": -1e39},
    ],
)
def test_no_change_leaves_the_finite_numbers(change, temperature):
    logits = np.array([LARGEST, -LARGEST, 0.0, 5.0, -5.0], np.float32)
    sample = row(temperature=temperature, generated=[0, 1, 2, 3, 4], **change)
    assert np.isfinite(changed(logits, sample)).all()
    drawn = Sampler(5).sample(torch.from_numpy(logits)[None], [sample])
    assert drawn.finite.all()
    assert not drawn.errors


def test_log_probabilities_stay_those_of_the_raw_logits():
    logits = text_like(1)
    token = int(logits[0].argsort()[100])
    changes = {
        "logit_bias": ((token, 100.0),),
        "repetition_penalty": 1.5,
        "presence_penalty": 2.0,
        "generated": [4, 5],
        "min_tokens": 9,
        "stop_token_ids": (0, 1),
        "constraint": only(token, 4, 5),
        "typical_p": 0.5,
    }
    drawn = Sampler(V).sample(logits, [row(logprobs=20, **changes)])
    plain = Sampler(V).sample(logits, [row(temperature=0.0, logprobs=20)])
    report, raw = drawn.logprobs[0], plain.logprobs[0]
    assert report is not None
    assert raw is not None
    assert report.top == raw.top
    assert (report.token_id, drawn.tokens) == (token, [token])
    assert report.logprob == pytest.approx(float(torch.log_softmax(logits.double(), -1)[0, token]), abs=1e-4)


def test_stop_tokens_wait_for_the_fewest_tokens():
    logits = [1.0, 9.0, 8.0, 0.0]
    stops = {"stop_token_ids": (1, 2), "min_tokens": 3, "temperature": 0.0}
    rows = [row(position, **stops) for position in range(6)]
    assert Sampler(4).sample(torch.tensor([logits] * 6), rows).tokens == [0, 0, 0, 1, 1, 1]


def test_stop_tokens_that_are_ignored_may_come_at_any_time():
    """`ignore_eos` clears the stop tokens: they are tokens like others, the first ones too."""
    assert greedy([1.0, 9.0], stop_token_ids=(1,), min_tokens=5, ignore_eos=True) == 1


def test_a_stop_token_never_comes_early_at_any_temperature():
    logits = torch.tensor([[0.0, 30.0, 0.0]]).expand(200, 3).contiguous()
    rows = [
        row(j % 5, seed=j, temperature=2.0, stop_token_ids=(1,), min_tokens=5, typical_p=0.9)
        for j in range(200)
    ]
    assert set(Sampler(3).sample(logits, rows).tokens) == {0, 2}


def test_a_request_that_forbids_every_token_is_told_so_and_no_other():
    rows = [row(temperature=0.0), row(stop_token_ids=(0, 1), min_tokens=1), row(temperature=0.0)]
    drawn = Sampler(2).sample(torch.tensor([[0.0, 1.0]] * 3), rows)
    assert drawn.tokens == [1, 0, 1]
    assert list(drawn.errors) == [1]
