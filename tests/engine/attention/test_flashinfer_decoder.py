"""The CUDA decoder and the engine on it, on CPU tensors through FlashInfer's real functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from gpu_check_model import VOCAB, write_model

from engine.attention.base import KvShape
from engine.attention.flashinfer import FlashInferAttention
from engine.attention.flashinfer_graph import GraphKey, GraphLimits
from engine.attention.reference import ReferenceAttention
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models import cuda_setup, store
from engine.models.decoder import Decoder
from engine.models.loader import load_model
from engine.pipeline import Pipeline
from engine.runner import Runner
from engine.sampling.sampler import Sampler
from engine.scratch import Chunk, flat_plan
from tests.engine.attention.flashinfer_shim import Launches, cpu_kernels

pytestmark = pytest.mark.usefixtures("flashinfer_installed")

PAGE = 16
POOL = 40


@pytest.fixture(scope="module", params=[True, False], ids=["qk-norm", "plain"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), qk_norm=request.param)


@pytest.fixture
def launches(flashinfer_installed: Path) -> Iterator[Launches]:
    with cpu_kernels() as log:
        yield log


def capture(forward: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
    """What a CUDA graph does, in plain words: run again, into the same result."""
    result = forward()
    return lambda: result.copy_(forward()), result


def gpu_pipeline(model: Path, *, deterministic: bool = False, graph_rows: int = 0) -> Pipeline:
    config = EngineConfig(model=str(model), deterministic=deterministic)
    decoder = cuda_setup.load_cuda_decoder(config, store.resolve(str(model)), "cpu", capture)
    limits = GraphLimits(graph_rows, 500)
    attention = FlashInferAttention(
        kv_shape(decoder), decoder.dtype, device="cpu", deterministic=deterministic, graphs=limits
    )
    return Pipeline(decoder, attention, Sampler(VOCAB))


def oracle_pipeline(model: Path) -> Pipeline:
    decoder = load_model(str(model), torch.float32, arithmetic="plain", round_to_bf16=True)
    return Pipeline(decoder, ReferenceAttention(kv_shape(decoder), align=PAGE), Sampler(VOCAB))


def kv_shape(decoder: Decoder) -> KvShape:
    config = decoder.config
    return KvShape(config.num_layers, POOL, PAGE, config.num_heads, config.num_kv_heads, config.head_dim)


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [tokens(33, 1), tokens(5, 2), tokens(16, 3)]


def logits(pipeline: Pipeline, chunks: list[Chunk]) -> torch.Tensor:
    """fp32 [rows, vocab] of all rows of a step."""
    with torch.inference_mode():
        plan = flat_plan(chunks, PAGE, PAGE)
        return pipeline.logits(pipeline.hidden(plan), range(plan.rows))


def prefill() -> list[Chunk]:
    return [Chunk(1 + 4 * i, 0, ids) for i, ids in enumerate(PROMPTS)]


def decode(step: int = 0) -> list[Chunk]:
    return [Chunk(1 + 4 * i, len(ids) + step, [7 + i + step]) for i, ids in enumerate(PROMPTS)]


def test_the_decoder_computes_what_the_oracle_does(launches: Launches, model: Path) -> None:
    ours, oracle = gpu_pipeline(model), oracle_pipeline(model)
    for chunks in (prefill(), decode()):
        given, expected = logits(ours, chunks), logits(oracle, chunks)
        assert given.dtype == torch.float32
        scale = expected.std()
        assert (given - expected).abs().max() < 0.15 * scale
        assert (given - expected).abs().mean() < 0.02 * scale


def test_replayed_decode_steps_give_the_rows_of_eager_ones(launches: Launches, model: Path) -> None:
    eager, graphed = gpu_pipeline(model), gpu_pipeline(model, graph_rows=4)
    for pipeline in (eager, graphed):
        logits(pipeline, prefill())
    for step in range(3):
        expected = logits(eager, decode(step))
        given = logits(graphed, decode(step))
        assert graphed.attention.graph_key == GraphKey(4, 1)  # type: ignore[attr-defined]
        torch.testing.assert_close(given, expected, rtol=2e-2, atol=2e-2)


def test_graphs_belong_to_the_pages_and_the_layers_that_they_were_captured_with(
    launches: Launches, model: Path
) -> None:
    """One decoder serves several executors, and is shallow beside deep: none replays what is another's."""
    deep, eager = gpu_pipeline(model, graph_rows=4), gpu_pipeline(model)
    shallow = Pipeline(deep.decoder.shallow(1), deep.attention, deep.sampler)
    other = Pipeline(deep.decoder, gpu_pipeline(model, graph_rows=4).attention, deep.sampler)
    flat = Pipeline(eager.decoder.shallow(1), eager.attention, eager.sampler)
    for pipeline, expected in ((deep, eager), (shallow, flat), (other, eager)):
        logits(pipeline, prefill())
        logits(expected, prefill())
        for step in range(2):
            given = logits(pipeline, decode(step))
            torch.testing.assert_close(given, logits(expected, decode(step)), rtol=2e-2, atol=2e-2)


def test_deterministic_products_all_have_the_same_shape(
    launches: Launches, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    real = torch.nn.functional.linear

    def linear(x: torch.Tensor, *rest: torch.Tensor | None) -> torch.Tensor:
        seen.add(x.shape[0])
        return real(x, *rest)

    pipeline = gpu_pipeline(model, deterministic=True)
    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    logits(pipeline, prefill())
    logits(pipeline, decode())
    assert seen == {16}


def test_a_shallow_decoder_runs_its_first_layers_only(launches: Launches, model: Path) -> None:
    pipeline = gpu_pipeline(model)
    shallow = Pipeline(pipeline.decoder.shallow(1), pipeline.attention, pipeline.sampler)
    launches.seen.clear()
    logits(shallow, decode())
    assert len(launches.of("append")) == 1


def test_float32_is_refused(model: Path) -> None:
    config = EngineConfig(model=str(model), dtype="float32")
    with pytest.raises(ConfigError, match="HEADWATER_DTYPE=float32 is not served"):
        cuda_setup.load_cuda_decoder(config, store.resolve(str(model)), device="cpu")


def test_the_runner_refuses_flashinfer_without_a_gpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU"):
        Runner.load(EngineConfig(model=str(model), executor="flashinfer"))


def test_equal_bits_are_wanted_flat_and_pages_are_enough_to_share() -> None:
    fast = EngineConfig(executor="flashinfer")
    exact = EngineConfig(executor="flashinfer", deterministic=True)
    assert (fast.grouping, exact.grouping) == ("auto", "off")
    assert EngineConfig(executor="flashinfer", deterministic=True, cascade="force").grouping == "force"
    assert EngineConfig(deterministic=True).grouping == "auto"
    assert (fast.align, EngineConfig().align) == (16, 256)
