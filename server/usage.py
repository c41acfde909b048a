"""Usage, perf_metrics and headers, all from the same receipts, so that they can't disagree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

from engine import CacheReceipt, EngineRequest
from server.schema.responses import CompletionTokensDetails, PromptTokensDetails, Usage

PREFIXES = ("fireworks-", "x-headwater-")


class Counted(Protocol):
    """What is counted of one choice."""

    @property
    def request(self) -> EngineRequest: ...

    @property
    def completion_tokens(self) -> int: ...

    @property
    def reasoning_tokens(self) -> int: ...

    @property
    def receipt(self) -> CacheReceipt | None: ...


class Timing:
    """When a request came, when its first token did and when it ended, in seconds of time.monotonic.

    Not of the loop's clock, which uvloop counts in whole milliseconds. `submitted` is when its prompt was
    tokenized, `concurrent` how many requests were being answered then.
    """

    __slots__ = ("concurrent", "ended", "first_token", "started", "submitted")

    def __init__(self, started: float, submitted: float | None = None, concurrent: int = 1) -> None:
        self.started = started
        self.submitted = submitted
        self.concurrent = concurrent
        self.first_token: float | None = None
        self.ended: float | None = None


class Tally(NamedTuple):
    """What a request has used by now, and its perf_metrics."""

    usage: Usage
    perf: dict[str, str]


def tally(choices: Sequence[Counted], timing: Timing) -> Tally:
    """Sum up what is known by now. The choices of a prompt stand together."""
    return Tally(usage_of(choices), perf_metrics(choices, timing))


def usage_of(choices: Iterable[Counted]) -> Usage:
    """Sum the usage of all choices. The choices of a prompt stand together and count it once."""
    prompt = cached = written = completion = reasoning = 0
    for _, group in groupby(choices, key=lambda choice: choice.request.prompt_index):
        same = list(group)
        receipt = _receipt(same)
        prompt += receipt.prompt_tokens
        cached += receipt.cached_tokens
        written += receipt.written_tokens
        completion += sum(choice.completion_tokens for choice in same)
        reasoning += sum(choice.reasoning_tokens for choice in same)
    return Usage(
        prompt,
        completion,
        prompt + completion,
        PromptTokensDetails(cached, written),
        CompletionTokensDetails(reasoning),
    )


def perf_metrics(choices: Sequence[Counted], timing: Timing) -> dict[str, str]:
    """Name what is known by now: tokens, and times in decimal seconds. What isn't known is left out."""
    usage = usage_of(choices)
    metrics = {"prompt-tokens": str(usage.prompt_tokens)}
    if all(choice.receipt is not None for choice in choices):
        metrics["cached-prompt-tokens"] = str(usage.prompt_tokens_details.cached_tokens)
    first, ended = timing.first_token, timing.ended
    if first is not None:
        metrics["server-time-to-first-token"] = f"{first - timing.started:.6f}"
    if ended is not None:
        metrics["server-processing-time"] = f"{ended - timing.started:.6f}"
    if timing.submitted is not None:
        metrics["tokenizer-duration"] = f"{timing.submitted - timing.started:.6f}"
        if first is not None:
            metrics["prefill-duration"] = f"{first - timing.submitted:.6f}"
    if first is not None and ended is not None:
        metrics["generation-duration"] = f"{ended - first:.6f}"
    metrics["num-concurrent-requests"] = str(timing.concurrent)
    return metrics


def headers(metrics: dict[str, str]) -> dict[str, str]:
    """Write metrics as response headers, under Fireworks' names and our own."""
    return {prefix + name: value for prefix in PREFIXES for name, value in metrics.items()}


def _receipt(same: Sequence[Counted]) -> CacheReceipt:
    """The receipt of one prompt: of the choice that computed it for the others, so the one least cached.

    A prompt that never ran counts, with nothing cached.
    """
    receipts = [choice.receipt for choice in same if choice.receipt is not None]
    if not receipts:
        return CacheReceipt(len(same[0].request.prompt), 0)
    return min(receipts, key=lambda receipt: receipt.cached_tokens)
