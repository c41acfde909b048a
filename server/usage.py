"""Usage, perf_metrics and headers, all from the same receipts, so that they can't disagree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from engine import CacheReceipt
from server.schema.responses import PromptTokensDetails, Usage

PREFIXES = ("fireworks-", "x-headwater-")


class Counted(Protocol):
    """What is counted of one choice."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def completion_tokens(self) -> int: ...

    @property
    def receipt(self) -> CacheReceipt | None: ...


class Timing:
    """When a request came, when its first token did and when it ended, in seconds of time.monotonic.

    Not of the loop's clock, which uvloop counts in whole milliseconds.
    """

    __slots__ = ("ended", "first_token", "started")

    def __init__(self, started: float) -> None:
        self.started = started
        self.first_token: float | None = None
        self.ended: float | None = None


def usage_of(choices: Iterable[Counted]) -> Usage:
    """Sum the usage of all choices. A choice that never ran counts its prompt, and nothing cached."""
    prompt = cached = completion = 0
    for choice in choices:
        receipt = choice.receipt or CacheReceipt(choice.prompt_tokens, 0)
        prompt += receipt.prompt_tokens
        cached += receipt.cached_tokens
        completion += choice.completion_tokens
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))


def perf_metrics(choices: Sequence[Counted], timing: Timing) -> dict[str, str]:
    """Name what is known by now: tokens, and times in decimal seconds. What isn't known is left out."""
    usage = usage_of(choices)
    metrics = {"prompt-tokens": str(usage.prompt_tokens)}
    if all(choice.receipt is not None for choice in choices):
        metrics["cached-prompt-tokens"] = str(usage.prompt_tokens_details.cached_tokens)
    if timing.first_token is not None:
        metrics["server-time-to-first-token"] = f"{timing.first_token - timing.started:.6f}"
    if timing.ended is not None:
        metrics["server-processing-time"] = f"{timing.ended - timing.started:.6f}"
    return metrics


def headers(metrics: dict[str, str]) -> dict[str, str]:
    """Write metrics as response headers, under Fireworks' names and our own."""
    return {prefix + name: value for prefix in PREFIXES for name, value in metrics.items()}
