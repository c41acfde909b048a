"""The runner: chunks, company and copies change no bit; what is not finite is named; plans are obeyed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError, ModelError
from engine.models.linear import native_bf16
from engine.pipeline import SCORE_BLOCK
from engine.plan import RowCopy, SampleRow, ScoreRows, StepPlan, StepResult
from engine.runner import Runner
from engine.types import SamplingParams, TokenLogprob
from tests.engine.attention.plans import Member, step_plan
from tests.kernels import has_kernel, needs_kernel

TILE = 32
EXECUTORS = ["compiled", "torch"] if has_kernel() else ["torch"]
DTYPES = ["float32", *(["bfloat16"] if native_bf16() else [])]
GREEDY = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5)
SEEDED = SamplingParams(max_tokens=1, temperature=0.9, top_p=0.95, logprobs=5)


@dataclass
class Text:
    """One sequence: its pages, its token ids and how it goes on."""

    first_page: int
    ids: list[int]
    params: SamplingParams = GREEDY
    seed: int = 7

    def member(self, start: int, rows: int) -> Member:
        return Member((), tuple(range(self.first_page, self.first_page + 16)), start, rows)

    def sample(self, row: int) -> SampleRow:
        return SampleRow(row, self.params, self.seed, 0, 0, len(self.ids))


def plan(parts: Sequence[tuple[Text, int, int]], **fields: object) -> StepPlan:
    """A step of chunks (text, start, rows), sampling from each that reaches its text's end."""
    members, tokens, samples, sequences = [], [], [], []
    for i, (text, start, rows) in enumerate(parts):
        members.append(text.member(start, rows))
        tokens += text.ids[start : start + rows]
        if start + rows == len(text.ids):
            samples.append(text.sample(len(tokens) - 1))
            sequences.append(i)
    made = step_plan(
        members, 16, TILE, tokens=tokens, samples=tuple(samples), sample_sequences=tuple(sequences)
    )
    return made._replace(**fields)


def generate(runner: Runner, text: Text, count: int, chunk: int) -> list[TokenLogprob | None]:
    """Prefill in chunks, then decode `count` tokens; their log-probabilities, ids among them."""
    found: list[TokenLogprob | None] = []
    for start in range(0, len(text.ids), chunk):
        result = runner.run(plan([(text, start, min(chunk, len(text.ids) - start))]))
    for _ in range(count):
        assert result.bad == frozenset()
        found += result.logprobs
        text.ids.append(result.tokens[0])
        result = runner.run(plan([(text, len(text.ids) - 1, 1)]))
    return found


def load(model: Path, **settings: object) -> Runner:
    fields = {"model": str(model), "tile": TILE, "kv_gb": 0.05, **settings}
    return Runner.load(EngineConfig(**fields))  # type: ignore[arg-type]


def prompt(runner: Runner, length: int, seed: int = 0) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(3, runner.info.vocab_size, (length,), generator=random).tolist()


@pytest.fixture(scope="module", params=DTYPES)
def real(request: pytest.FixtureRequest, smollm2: Path) -> Runner:
    return load(smollm2, dtype=request.param, kv_gb=0.1)


@pytest.fixture(scope="module", params=EXECUTORS)
def tiny(request: pytest.FixtureRequest, tiny_model: Path) -> Runner:
    return load(tiny_model, dtype="float32", executor=request.param)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_chunks_change_no_bit_of_the_real_model(real: Runner, params: SamplingParams) -> None:
    """Promise 1: at once, in chunks of 16 and 17, and one by one: the same ids and log-probabilities."""
    assert real.info.bit_identical
    ids = prompt(real, 75)
    at_once = generate(real, Text(1, list(ids), params), 4, 75)
    for place, chunk in enumerate((16, 17, 1)):
        assert generate(real, Text(20 + 20 * place, list(ids), params), 4, chunk) == at_once


def test_company_changes_no_bit_of_the_real_model(real: Runner) -> None:
    """Promise 1: prefill and decode of many sequences in one step give each what it gets alone."""
    texts = [Text(1 + 8 * i, prompt(real, 3 + 9 * i, seed=i)) for i in range(9)]
    alone = [real.run(plan([(text, 0, len(text.ids))])) for text in texts]
    together = real.run(plan([(text, 0, len(text.ids)) for text in texts]))
    assert together.logprobs == tuple(result.logprobs[0] for result in alone)
    for text, token in zip(texts, together.tokens, strict=True):
        text.ids.append(token)
    mixed = real.run(
        plan([(t, 0, len(t.ids)) if i == 4 else (t, len(t.ids) - 1, 1) for i, t in enumerate(texts)])
    )
    alone = [real.run(plan([(text, len(text.ids) - 1, 1)])) for text in texts]
    assert mixed.logprobs == tuple(result.logprobs[0] for result in alone)


def test_copied_rows_go_on_to_the_same_bits(real: Runner) -> None:
    """COPY of the rows matched inside a page, then the rest: as if all had been computed."""
    ids = prompt(real, 30)
    cold = real.run(plan([(Text(1, ids), 0, 30)]))
    warm = Text(50, ids)
    copies = (RowCopy(1, 50, 16), RowCopy(2, 51, 7))
    assert real.run(plan([(warm, 23, 7)], copies=copies)).logprobs == cold.logprobs


def test_the_reference_executor_writes_what_transformers_writes(tiny_model: Path) -> None:
    """Greedy ids of the flat fp32 oracle equal those of the model's own implementation."""
    from transformers import LlamaForCausalLM

    runner = load(tiny_model, dtype="float32", executor="reference")
    oracle = LlamaForCausalLM.from_pretrained(tiny_model)
    for seed, length in enumerate((1, 16, 50)):
        ids = prompt(runner, length, seed)
        text = Text(1, list(ids))
        generate(runner, text, 24, 16)
        wanted = oracle.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=24, eos_token_id=None, pad_token_id=0
        )
        assert text.ids == wanted[0].tolist()


def test_both_executors_agree_within_rounding(tiny: Runner, tiny_model: Path) -> None:
    reference = load(tiny_model, dtype="float32", executor="reference")
    ids = prompt(tiny, 100)
    mine = generate(tiny, Text(1, list(ids)), 5, 40)
    theirs = generate(reference, Text(1, list(ids)), 5, 100)
    for a, b in zip(mine, theirs, strict=True):
        assert a is not None
        assert b is not None
        assert a.token_id == b.token_id
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def poisoned(runner: Runner, step: StepPlan, row: int) -> StepPlan:
    """The same step with one row's token replaced by one whose embedding is not a number."""
    embedding = runner.pipeline.decoder._embedding
    token = next(t for t in range(runner.info.vocab_size) if t not in step.token_ids)
    embedding[token] = float("nan")
    tokens = step.token_ids.copy()
    tokens[row] = token
    return step._replace(token_ids=tokens)


@pytest.mark.parametrize("row", [0, 9, 10, 11, 17])
def test_a_nan_is_blamed_on_its_sequence_alone(tiny: Runner, row: int) -> None:
    """A row that isn't finite ends its own sequence, also where it isn't sampled; the others' bits stay."""
    texts = [Text(1, prompt(tiny, 10)), Text(20, prompt(tiny, 1, 1)), Text(40, prompt(tiny, 7, 2))]
    step = plan([(text, 0, len(text.ids)) for text in texts])
    clean = tiny.run(step)
    assert clean.bad == frozenset()
    embedding = tiny.pipeline.decoder._embedding.clone()
    sick = tiny.run(poisoned(tiny, step, row))
    tiny.pipeline.decoder._embedding.copy_(embedding)
    tiny.pipeline.attention.wipe(range(1, 60))
    guilty = {0: 0, 9: 0, 10: 1, 11: 2, 17: 2}[row]
    assert sick.bad == {guilty}
    for i in {0, 1, 2} - {guilty}:
        assert sick.logprobs[i] == clean.logprobs[i]


def test_an_infinite_logit_is_blamed_on_its_sequence(tiny: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states may be finite where logits are not; samples need not be in the order of sequences."""
    logits = tiny.pipeline.decoder.logits

    def overflowing(hidden: torch.Tensor) -> torch.Tensor:
        out = logits(hidden).clone()
        out[1, 3] = float("inf")
        return out

    texts = [Text(1, prompt(tiny, 4)), Text(20, prompt(tiny, 6, 1)), Text(40, prompt(tiny, 3, 2))]
    step = plan([(texts[0], 0, 4), (texts[1], 0, 5), (texts[2], 0, 3)])  # the second isn't sampled
    clean = tiny.run(step)
    monkeypatch.setattr(tiny.pipeline.decoder, "logits", overflowing)
    sick = tiny.run(step)
    assert step.sample_sequences == (0, 2)
    assert sick.bad == {2}
    assert sick.logprobs[0] == clean.logprobs[0]


def scores_of(parts: Sequence[tuple[Text, int, int]], top: int = 3) -> tuple[ScoreRows, ...]:
    """Every row of every part is scored with the token that follows it, where there is one."""
    found, row = [], 0
    for i, (text, start, rows) in enumerate(parts):
        if targets := tuple(text.ids[start + 1 : start + rows + 1]):
            found.append(ScoreRows(row, targets, top, i))
        row += rows
    return tuple(found)


def test_a_row_is_scored_as_it_is_sampled(tiny: Runner) -> None:
    """Whole prompts together, in chunks, and one row at a time with its token sampled: the same bits."""
    texts = [Text(1, prompt(tiny, 90)), Text(20, prompt(tiny, 1, 1)), Text(40, prompt(tiny, 37, 2))]
    parts = [(text, 0, len(text.ids)) for text in texts]
    together = tiny.run(plan(parts, scores=scores_of(parts))).scores
    assert [len(found) for found in together] == [89, 36]
    text = texts[0]
    chunked: list[TokenLogprob] = []
    for start in range(0, 90, 41):
        part = [(text, start, min(41, 90 - start))]
        chunked += tiny.run(plan(part, scores=scores_of(part))).scores[0]
    assert tuple(chunked) == together[0]
    for row in (0, 15, 16, 31, 32, 88):
        alone = Text(60, text.ids[: row + 1], SamplingParams(max_tokens=1, temperature=0.0, logprobs=3))
        (sampled,) = tiny.run(plan([(alone, 0, row + 1)])).logprobs
        assert sampled is not None
        assert together[0][row].top == sampled.top
        assert together[0][row].token_id == text.ids[row + 1]


def test_scoring_holds_logits_of_some_rows_at_once(tiny: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """O085: a long prompt costs no more memory than a short one."""
    logits, held = tiny.pipeline.decoder.logits, list[int]()

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        held.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(tiny.pipeline.decoder, "logits", counted)
    parts = [(Text(1, prompt(tiny, 200)), 0, 199)]
    (found,) = tiny.run(plan(parts, scores=scores_of(parts))).scores
    assert len(found) == 199
    assert max(held) == SCORE_BLOCK
    assert sum(held) >= 199


@pytest.mark.parametrize("row", [0, 3, 4, 9])
def test_a_scored_logit_that_is_not_finite_is_blamed_on_its_sequence(
    tiny: Runner, monkeypatch: pytest.MonkeyPatch, row: int
) -> None:
    """Also where the sequence is not sampled, and where it is not the first that is scored."""
    texts = [Text(1, prompt(tiny, 5)), Text(20, prompt(tiny, 7, 1)), Text(40, prompt(tiny, 3, 2))]
    parts = [(texts[0], 0, 4), (texts[1], 0, 6), (texts[2], 0, 3)]
    step = plan(parts, scores=scores_of(parts))
    clean = tiny.run(step)
    hidden = tiny.pipeline.hidden(step)
    logits = tiny.pipeline.decoder.logits

    def overflowing(rows: torch.Tensor) -> torch.Tensor:
        out = logits(rows).clone()
        out[(rows == hidden[row]).all(1), 3] = float("-inf")
        return out

    monkeypatch.setattr(tiny.pipeline.decoder, "logits", overflowing)
    sick = tiny.run(step)
    guilty = 0 if row < 4 else 1
    assert (clean.bad, sick.bad) == (frozenset(), {guilty})
    assert sick.scores == tuple(() if i == guilty else found for i, found in enumerate(clean.scores))
    assert sick.logprobs == clean.logprobs


def test_a_wiped_page_forgets_a_nan(tiny: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad step's pages, wiped by a later plan, serve another sequence with the right bits."""
    text = Text(1, prompt(tiny, 20))
    clean = tiny.run(plan([(text, 0, 20)]))
    attention, slots = tiny.pipeline.attention, torch.arange(16, 48)
    for layer in range(2):
        attention.write_rows(layer, slots, torch.full_like(attention.read_rows(layer, slots), float("nan")))
    dirty = tiny.run(plan([(text, 0, 20)]))
    assert dirty.bad == {0}
    assert tiny.run(plan([(text, 0, 20)], wipe=(1, 2))).logprobs == clean.logprobs


def test_a_step_without_samples_gives_none(tiny: Runner) -> None:
    before = tiny.counters
    result = tiny.run(plan([(Text(1, prompt(tiny, 40)), 0, 21)]))
    assert result == StepResult((), (), frozenset(), result.seconds)
    after = tiny.counters
    assert (after.steps - before.steps, after.rows - before.rows) == (1, 21)
    assert after.sampled == before.sampled


def test_an_impossible_plan_raises_and_the_next_step_runs(tiny: Runner) -> None:
    text = Text(1, prompt(tiny, 20))
    good = plan([(text, 0, 20)])
    clean = tiny.run(good)
    with pytest.raises(ValueError, match="impossible plan"):
        tiny.run(good._replace(write_slots=good.write_slots + 1))
    with pytest.raises(IndexError):
        tiny.run(good._replace(token_ids=good.token_ids + 10**6))
    assert tiny.run(good).logprobs == clean.logprobs


def test_info_says_what_runs(tiny_model: Path) -> None:
    runner = load(tiny_model, dtype="float32", threads=1, kv_gb=0.001)
    info = runner.info
    page_bytes = 2 * 2 * 16 * 2 * 16 * 4
    assert (info.dtype, info.executor, info.threads) == ("float32", EXECUTORS[0], 1)
    assert info.num_pages == 1_000_000 // page_bytes
    assert info.kv_bytes == info.num_pages * page_bytes
    assert info.context_length == 512
    assert info.vocab_size == 320
    assert info.bit_identical
    slots = torch.arange(info.num_pages * info.page_size)
    assert not any(runner.pipeline.attention.read_rows(layer, slots).any() for layer in range(2))
    assert load(tiny_model, dtype="float32", kv_gb=0.0001).info.context_length == 10 * 16
    assert load(tiny_model, dtype="float32", max_context=100, kv_gb=0.0).info.num_pages == 1 + 64 * 7


def test_fingerprints_tell_numerics_apart(tiny_model: Path) -> None:
    base = load(tiny_model, dtype="float32").info.fingerprint
    assert load(tiny_model, dtype="float32", kv_gb=0.02, page_size=32).info.fingerprint == base
    for change in (
        {"tile": 64},
        {"executor": "reference"},
        {"executor": "torch"} if has_kernel() else {"tile": 128},
        {"dtype": "auto"} if native_bf16() else {"tile": 16},
    ):
        assert load(tiny_model, **{"dtype": "float32", **change}).info.fingerprint != base


def test_without_a_compiler_torch_computes_and_says_so(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One note, no failure; and a plain refusal where the compiled kernel was asked for by name."""
    monkeypatch.setenv("HEADWATER_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    info = load(tiny_model).info
    assert info.executor == "torch"
    assert [note for note in info.notes if "no C++ compiler: CXX=no-such-compiler" in note]
    with pytest.raises(ConfigError, match="HEADWATER_EXECUTOR=compiled can't be had: no C"):
        load(tiny_model, executor="compiled")


@needs_kernel
def test_what_the_kernel_has_no_code_for_runs_on_torch(tiny_model: Path) -> None:
    info = load(tiny_model, dtype="float32", page_size=8).info
    assert info.executor == "torch"
    assert [note for note in info.notes if "pages of 8 tokens are not a multiple of 16" in note]


def test_auto_takes_bfloat16_where_the_cpu_has_it(tiny_model: Path) -> None:
    assert load(tiny_model).info.dtype == ("bfloat16" if native_bf16() else "float32")


@pytest.mark.parametrize("kv_gb", [0.00001, 4096.0])
def test_a_pool_that_cannot_be_is_refused_in_one_line(tiny_model: Path, kv_gb: float) -> None:
    with pytest.raises(ConfigError, match=r"^HEADWATER_KV_GB=\S+ is .*$"):
        load(tiny_model, dtype="float32", kv_gb=kv_gb)


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        load(tmp_path / "nothing.gguf")
