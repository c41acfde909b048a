"""Log-probabilities are those of the raw logits, for the rows that ask and no others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.plan import SampleRow
from engine.sampling.sampler import Sampler
from engine.types import SamplingParams

V = 49152


def row(position: int = 0, **params) -> SampleRow:
    return SampleRow(0, SamplingParams(max_tokens=1, **params), 5, 0, 0, position)


def logits_of(n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(20)
    return (3 * torch.randn(n, V, generator=generator)).bfloat16().float()


@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_chosen_and_likeliest_are_log_softmax_of_the_raw_logits(k):
    logits = logits_of(6)
    rows = [row(j, temperature=j * 0.4, top_k=30, logprobs=k) for j in range(6)]
    tokens, logprobs, *_ = Sampler(V).sample(logits, rows)
    exact = torch.log_softmax(logits.double(), dim=-1)
    orders = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :k].tolist()
    for j, (token, report) in enumerate(zip(tokens, logprobs, strict=True)):
        assert report is not None
        assert report.token_id == token
        assert report.logprob == pytest.approx(float(exact[j, token]), abs=1e-5)
        assert [i for i, _ in report.top] == orders[j]
        assert [v for _, v in report.top] == pytest.approx(exact[j, orders[j]].tolist(), abs=1e-5)


def test_the_greedy_token_leads_its_alternatives_with_the_same_number():
    tokens, logprobs, *_ = Sampler(V).sample(logits_of(9), [row(temperature=0.0, logprobs=3)] * 9)
    for token, report in zip(tokens, logprobs, strict=True):
        assert report is not None
        assert report.top[0] == (token, report.logprob)


def test_temperature_and_filters_do_not_touch_log_probabilities():
    logits = logits_of(1)
    plain = Sampler(V).sample(logits, [row(temperature=0.0, logprobs=20)])[1][0]
    bent = Sampler(V).sample(logits, [row(temperature=3.0, top_p=0.2, top_k=1, min_p=0.5, logprobs=20)])[1][0]
    assert bent == plain


def test_only_rows_that_ask_get_any():
    rows = [row(j, logprobs=None if j % 2 else j) for j in range(6)]
    logprobs = Sampler(V).sample(logits_of(6), rows)[1]
    assert [None if report is None else len(report.top) for report in logprobs] == [0, None, 2, None, 4, None]


def test_alternatives_that_tie_come_by_id_and_the_cut_falls_among_them():
    logits = torch.zeros(2, V)
    logits[1, [9, 40000]] = 1.0
    logprobs = Sampler(V).sample(logits, [row(temperature=0.0, logprobs=4)] * 2)[1]
    tops = [[i for i, _ in report.top] for report in logprobs if report is not None]
    assert tops == [[0, 1, 2, 3], [9, 40000, 0, 1]]


def test_more_alternatives_than_tokens_give_all_tokens():
    report = Sampler(3).sample(torch.tensor([[0.0, 2.0, 1.0]]), [row(temperature=0.0, logprobs=20)])[1][0]
    assert report is not None
    assert [i for i, _ in report.top] == [1, 2, 0]
    assert np.exp([v for _, v in report.top]).sum() == pytest.approx(1.0)


def test_a_distant_runner_up_is_still_reported():
    logits = torch.full((1, V), -1000.0)
    logits[0, 5], logits[0, 6] = 1000.0, -500.0
    report = Sampler(V).sample(logits, [row(temperature=0.0, logprobs=3)])[1][0]
    assert report is not None
    assert report.top == ((5, 0.0), (6, -1500.0), (0, -2000.0))
