"""The runner: a loaded model and its KV memory, executing one StepPlan at a time on the compute thread."""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

import numpy as np
import torch

from engine import costs, executors, gate, machine, probe
from engine.attention.base import KvReads
from engine.attention.flashinfer_library import require_cuda
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models import cuda_setup, store
from engine.models.decoder import Decoder
from engine.models.native import NativeDecoder
from engine.pipeline import Padding, Pipeline, finite_rows
from engine.plan import GateCosts, StepCosts, StepPlan, StepResult
from engine.types import EngineInfo
from engine.verify import Verifier

logger = logging.getLogger(__name__)

GB = 1e9
# The zero page, one to use, and one to spare.
_LEAST_PAGES = 3


class RunnerCounters(NamedTuple):
    """What a runner has done since it was loaded. `reads` are the KV reads of the last step, a layer."""

    steps: int
    rows: int
    sampled: int
    reads: KvReads


class Runner:
    """Loaded model, KV memory and sampler. Every call is made on one and the same thread."""

    def __init__(
        self,
        pipeline: Pipeline,
        info: EngineInfo,
        step_costs: StepCosts,
        gate_costs: GateCosts | None = None,
        verify: float = 0.0,
    ) -> None:
        self.info = info
        self.costs = step_costs
        self.gate = gate_costs or GateCosts()
        self.pipeline = pipeline
        self._verifier = Verifier(verify, bit_identical=info.bit_identical)
        self._steps = self._rows = self._sampled = 0

    @classmethod
    def load(cls, config: EngineConfig) -> Runner:
        """Load the model, size the KV pool, probe the arithmetic and measure step costs.

        Sets torch's thread count for the calling thread, which must be the one that runs steps. Raises
        ConfigError for a pool that is too small or larger than the memory, ModelError for the model.
        """
        if config.executor == "flashinfer":
            require_cuda()
        threads = config.threads or machine.usable_cpus()
        torch.set_num_threads(threads)
        location = store.resolve(config.model)
        decoder, notes = executors.load_decoder(config, location)
        with torch.inference_mode():
            verdict = _verdict(config, decoder)
        pages = _pool_pages(config, decoder)
        pipeline = executors.make_pipeline(config, decoder, decoder.config.num_layers, pages)
        pipeline.pad(verdict.padding)
        context, context_notes = _context(config, decoder, pages)
        with torch.inference_mode():
            step_costs = costs.measure(pipeline, context)
        info = EngineInfo(
            model=location.name,
            dtype=str(decoder.dtype).removeprefix("torch."),
            executor=pipeline.attention.name,
            threads=threads,
            context_length=context,
            vocab_size=decoder.config.vocab_size,
            page_size=config.page_size,
            num_pages=pages,
            kv_bytes=pages * executors.page_bytes(config, decoder),
            num_layers=decoder.config.num_layers,
            fingerprint=_fingerprint(config, pipeline, verdict),
            bit_identical=verdict.bit_identical,
            notes=(*notes, *context_notes, *verdict.notes),
        )
        with torch.inference_mode():
            gate_costs = _gate_costs(config, pipeline, info)
        _log(info, step_costs)
        return cls(pipeline, info, step_costs, gate_costs, config.cascade_verify)

    @property
    def counters(self) -> RunnerCounters:
        return RunnerCounters(self._steps, self._rows, self._sampled, self.pipeline.attention.kv_tokens_read)

    def run(self, plan: StepPlan) -> StepResult:
        """Execute one step: wipe, copies, forward pass, sampling.

        Raises ValueError on an impossible plan before anything is written by it but wipes and copies;
        what torch raises passes through. A sequence with a non-finite number is named in the result.
        """
        started = time.perf_counter()
        with torch.inference_mode():
            hidden = self.pipeline.hidden(plan)
            bad_rows = np.flatnonzero(~finite_rows(hidden))
            sampled = self.pipeline.sample(hidden, plan.samples)
        seconds = time.perf_counter() - started
        verified = self._verifier.wants(plan)
        with torch.inference_mode():
            # Not part of `seconds`, from which the scheduler learns its pace: other rows have no such work.
            # Before the step is verified: then its hidden rows may be written over.
            scores = list(self.pipeline.score(hidden, plan.scores))
            differing = self._verifier.differing_rows(self.pipeline, plan, hidden) if verified else 0
        # Row r belongs to the last sequence that starts at or before it.
        bad = set((np.searchsorted(plan.row_indptr, bad_rows, side="right") - 1).tolist())
        bad.update(plan.sample_sequences[j] for j in np.flatnonzero(~sampled.finite).tolist())
        bad.update(row.sequence for row, found in zip(plan.scores, scores, strict=True) if found is None)
        self._steps += 1
        self._rows += plan.rows
        self._sampled += len(plan.samples)
        return StepResult(
            tuple(sampled.tokens),
            tuple(sampled.logprobs),
            frozenset(bad),
            seconds,
            verified,
            differing,
            bounds=tuple(sampled.bounds),
            errors=sampled.errors,
            scores=tuple(found or () for found in scores),
        )


def _verdict(config: EngineConfig, decoder: Decoder) -> probe.Verdict:
    """Probe the arithmetic where it promises equal bits."""
    if config.executor == "flashinfer" and (not config.deterministic or config.grouping != "off"):
        return probe.Verdict(Padding(rows=1, queries=1), False, (cuda_setup.TOLERANCE_NOTE,))
    pages = probe.pages_needed(config.page_size, config.tile, decoder.config.context_length)
    return probe.probe(executors.make_pipeline(config, decoder, 1, pages))


def _gate_costs(config: EngineConfig, pipeline: Pipeline, info: EngineInfo) -> GateCosts:
    """What the gate weighs: as pinned, else as measured where it decides anything."""
    if config.cascade_costs:
        return GateCosts.parse(config.cascade_costs)
    attention, decoder = pipeline.attention, pipeline.decoder
    if config.grouping != "auto" or config.cascade_levels == 1 or attention.name == "reference":
        return GateCosts()
    device = torch.device("cuda" if config.executor == "flashinfer" else "cpu")
    shape = executors.kv_shape(config, decoder, decoder.config.num_layers, info.num_pages)
    return gate.load(attention, shape, decoder.dtype, device, info.fingerprint)


def _pool_pages(config: EngineConfig, decoder: Decoder) -> int:
    """Pages of the pool, the zero page counted. Raises ConfigError where they can't be had.

    By default a quarter of the memory limit, at most three quarters of what is free once the weights are
    loaded (on a GPU most of what is free there), and no more than 64 sequences of full length, or all that
    may run, could fill.
    """
    page_bytes = executors.page_bytes(config, decoder)
    on_gpu = config.executor == "flashinfer"
    limit, room = cuda_setup.gpu_memory() if on_gpu else _host_memory()
    if config.kv_gb:
        pages = int(config.kv_gb * GB / page_bytes)
        if pages * page_bytes > limit:
            raise ConfigError(
                f"HEADWATER_KV_GB={config.kv_gb:g} is more than the memory, {limit / GB:.1f} GB"
            )
    else:
        useful = 1 + max(64, config.max_running) * -(-decoder.config.context_length // config.page_size)
        pages = min(useful, int(room / page_bytes))
    if pages < _LEAST_PAGES:
        raise ConfigError(
            f"HEADWATER_KV_GB={config.kv_gb:g} is too little: give at least"
            f" {_LEAST_PAGES * page_bytes / GB:.6f}, which is {_LEAST_PAGES} pages"
        )
    return pages


def _host_memory() -> tuple[float, float]:
    """(bytes of the memory limit, bytes that KV may take now)."""
    limit = machine.memory_limit()
    return limit, min(limit / 4, machine.available_memory() * 0.75)


def _context(config: EngineConfig, decoder: Decoder, pages: int) -> tuple[int, tuple[str, ...]]:
    """The context limit in tokens, and what to tell where it is less than was asked.

    One page beside the zero page stays spare: with it, even a prompt that takes all others can copy the
    rows that it shares with a page of another's, so its match is exact to the token.
    """
    model = decoder.config.context_length
    context = min(model, (pages - 2) * config.page_size)
    if context < model:
        return context, (f"context is {context} tokens, not {model}: the KV pool holds no more (--kv-gb)",)
    if config.max_context > model:
        return context, (f"context is {model} tokens, the model's, not {config.max_context}",)
    return context, ()


def _fingerprint(config: EngineConfig, pipeline: Pipeline, verdict: probe.Verdict) -> str:
    """Whatever decides bits, but the weights: executor, instruction set, tile, dtype, torch, padding."""
    isa = torch.backends.cpu.get_cpu_capability()
    decoder = pipeline.decoder
    return machine.fingerprint(
        (
            pipeline.attention.name,
            str(isa),
            ",".join(machine.cpu_features()),
            f"tile {config.tile}",
            str(decoder.dtype),
            decoder.arithmetic,
            f"torch {torch.__version__}",
            f"rows {verdict.padding.rows}, queries {verdict.padding.queries}",
            *((decoder.library.name,) if isinstance(decoder, NativeDecoder) else ()),
            *(cuda_setup.gpu_fingerprint() if config.executor == "flashinfer" else ()),
        )
    )


def _log(info: EngineInfo, step_costs: StepCosts) -> None:
    logger.info(
        "%s: %s, executor %s, %d threads, context %d, %d pages of %d tokens, %.2f GB of KV, bits %s, %s",
        info.model,
        info.dtype,
        info.executor,
        info.threads,
        info.context_length,
        info.num_pages,
        info.page_size,
        info.kv_bytes / GB,
        "identical" if info.bit_identical else "not identical",
        info.fingerprint,
    )
    logger.info(
        "a step takes %.1f ms + %.3f ms a row + %.3f ms a thousand row-context pairs",
        step_costs.base_ms,
        step_costs.row_ms,
        step_costs.pair_ms * 1000,
    )
    for note in info.notes:
        logger.warning("%s", note)
