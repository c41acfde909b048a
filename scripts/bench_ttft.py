#!/usr/bin/env python3
"""Cold against warm time to first token, and prefill speed, of a running server.

Each round sends a prompt of random token ids that nobody has sent before, then the same prompt again, one
client at a time, and times both streams; between rounds it measures how fast this machine multiplies
matrices, so that figures from different machines can be compared. Medians over the rounds are printed.

    .venv/bin/python scripts/bench_ttft.py [--url http://127.0.0.1:8000] [--lengths 1000 4000] [--rounds 11]
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
import urllib.error
import urllib.request
from typing import Any, NamedTuple

TOKENS = 9


class Stream(NamedTuple):
    """Times of one streamed completion, in seconds, and its cached tokens."""

    ttft: float
    gap: float
    cached: int


class Round(NamedTuple):
    """One prompt sent twice, and what linears reached beside it, in GFLOP/s."""

    cold: Stream
    warm: Stream
    gflops: float


def call(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    return urllib.request.urlopen(request, timeout=600)


def stream(url: str, prompt: list[int]) -> Stream:
    """Stream a completion of TOKENS tokens. Token times are those at which the events arrive."""
    body = {
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "model": model_name(url),
    }
    start = time.perf_counter()
    times, cached = [], -1
    with call(url + "/v1/completions", body) as reply:
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            times += [time.perf_counter()] * sum(len(c.get("token_ids") or ()) for c in event["choices"])
            if event.get("usage"):
                cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    return Stream(times[0] - start, statistics.median(gaps), cached)


def model_name(url: str) -> str:
    with call(url + "/v1/models") as reply:
        return str(json.load(reply)["data"][0]["id"])


def linear_gflops() -> float:
    """FLOP rate of bf16 linears at 512 rows, in the shapes of the default model's layers: best of 5."""
    import torch

    shapes = [(960, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)] * 6
    weights = [torch.ops.mkldnn._reorder_linear_weight(torch.randn(s).bfloat16(), None) for s in shapes]
    inputs = {k: torch.randn(512, k).bfloat16() for k in (576, 1536)}
    flops, best = sum(2 * 512 * a * b for a, b in shapes), float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for weight, (_, k) in zip(weights, shapes, strict=True):
            torch.ops.mkldnn._linear_pointwise(inputs[k], weight, None, "none", [], "")
        best = min(best, time.perf_counter() - start)
    return flops / best / 1e9


def measure(url: str, length: int, rounds: int, rng: random.Random) -> list[Round]:
    found = []
    for i in range(rounds):
        prompt = [rng.randrange(1000, 40000) for _ in range(length)]
        cold = stream(url, prompt)
        warm = stream(url, prompt)
        if (cold.cached, warm.cached) != (0, length - 1):
            raise RuntimeError(f"cached {cold.cached} and {warm.cached} tokens, not 0 and {length - 1}")
        found.append(Round(cold, warm, linear_gflops()))
        print(f"  {length} tokens, round {i + 1} of {rounds}", end="\r", file=sys.stderr, flush=True)
    return found


def report(length: int, rounds: list[Round]) -> dict[str, float]:
    """Medians, and what follows from them."""

    def median(values: list[float]) -> float:
        return statistics.median(values)

    cold = median([r.cold.ttft for r in rounds])
    return {
        "prompt_tokens": length,
        "cold_ttft_ms": cold * 1e3,
        "warm_ttft_ms": median([r.warm.ttft for r in rounds]) * 1e3,
        "warm_share_of_cold": median([r.warm.ttft / r.cold.ttft for r in rounds]),
        "decode_step_ms": median([r.warm.gap for r in rounds]) * 1e3,
        "warm_ttft_in_decode_steps": median([r.warm.ttft / r.warm.gap for r in rounds]),
        "cold_tokens_per_s": length / cold,
        "linear_gflops": median([r.gflops for r in rounds]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 4000])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seed", type=int, default=None, help="of the prompts; default: new ones each time")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    try:
        stream(args.url, [rng.randrange(1000, 40000) for _ in range(64)])
        rows = [report(n, measure(args.url, n, args.rounds, rng)) for n in args.lengths]
    except urllib.error.HTTPError as error:
        print(f"the server refused: {error.read().decode(errors='replace')}", file=sys.stderr)
        return 1
    except (urllib.error.URLError, ConnectionError) as error:
        print(f"no server answers at {args.url}: {error}", file=sys.stderr)
        return 1
    for row in rows:
        for name, value in row.items():
            print(f"{name:28} {value:10.3f}")
        print()
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
