#!/usr/bin/env python3
"""Two servers in turn under the same load: Headwater with one setting and another, or Headwater and a peer.

Streams that share a long warm prefix, each with an ending of its own, greedy, to full length. Each round
starts a server, warms it, measures some waves, stops it, and goes on with the other: only one of the two is
alive at a time. By default A is HEADWATER_CASCADE=auto and B is HEADWATER_CASCADE=off.

    .venv/bin/python scripts/bench_serve.py
    .venv/bin/python scripts/bench_serve.py --a HEADWATER_THREADS=2 --b HEADWATER_THREADS=1
    .venv/bin/python scripts/bench_serve.py --peer-command 'peer serve --port {port}' --peer-model name

--peer-url takes a server that runs already, on another machine if the figures are to mean much. Any
OpenAI-compatible server will do; if it knows no `ignore_eos` its replies may end early.

Exit code: 0, 1 if a bar is missed, 2 if a server does not start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from bench_tools import Bar, at_least, ratio_interval, report_bars, table
from loadtest import LoadTest
from loadtest import parse as parse_load
from loadtest_client import CannotBegin, Client, connected, find_model
from loadtest_report import Record, duration, summarise
from loadtest_workloads import sessions

ROOT = Path(__file__).resolve().parent.parent
# A seed for all: both sides get the same prompts.
SEED = 20


class Side(NamedTuple):
    """One of the two: a command that serves on {port} with some environment, or a server that runs."""

    name: str
    command: str = ""
    env: tuple[tuple[str, str], ...] = ()
    url: str = ""
    model: str | None = None


class Run(NamedTuple):
    """One measured wave of streams."""

    tokens_per_s: float
    ttft_ms: float
    itl_ms: float
    cached: float | None


def headwater(name: str, settings: Sequence[str]) -> Side:
    """This engine with settings NAME=VALUE."""
    command = shlex.join([sys.executable, "-m", "server", "serve", "--port", "{port}"])
    env = tuple((key, value) for key, _, value in (setting.partition("=") for setting in settings))
    return Side(f"{name}: {' '.join(settings) or 'defaults'}", command, env)


def sides(options: argparse.Namespace) -> tuple[Side, Side]:
    first = headwater("headwater", options.a)
    if options.peer_url:
        return first, Side("peer", url=options.peer_url.rstrip("/"), model=options.peer_model)
    if options.peer_command:
        return first, Side("peer", options.peer_command, model=options.peer_model)
    return first, headwater("headwater", options.b)


# ---------------------------------------------------------------- servers


@contextmanager
def serving(side: Side, log: Path) -> Iterator[str]:
    """Start the side's server in a process group of its own; gives its base URL, and stops it."""
    if side.url:
        yield side.url
        return
    port = free_port()
    command = shlex.split(side.command.replace("{port}", str(port)))
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            env=clean_environment(os.environ, side.env),
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            stop(process)


def clean_environment(env: Mapping[str, str], extra: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The environment without Headwater's settings, but for where models lie, and with the side's own."""
    kept = {k: v for k, v in env.items() if not k.startswith("HEADWATER_") or k == "HEADWATER_CACHE_DIR"}
    return {**kept, **dict(extra)}


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the group to end, and insist after a while."""
    for number, patience in ((signal.SIGTERM, 30.0), (signal.SIGKILL, 30.0)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def wait_until_ready(http: aiohttp.ClientSession, url: str, log: Path, patience: float) -> None:
    """Poll until the server would serve. CannotBegin, with the end of its log, if it never does."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        try:
            async with http.get(f"{url}/models", timeout=aiohttp.ClientTimeout(total=5)) as response:
                if response.status == 200 and await _is_ready(http, url):
                    return
        except (aiohttp.ClientError, TimeoutError):
            pass
        await asyncio.sleep(0.5)
    raise CannotBegin(f"{url} did not start in {patience:.0f} s:\n{_end_of(log)}")


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:] if log.exists() else ""


async def _is_ready(http: aiohttp.ClientSession, url: str) -> bool:
    """Whether /ready, where there is one, says so."""
    async with http.get(f"{url.removesuffix('/v1')}/ready") as response:
        return response.status != 503


# ---------------------------------------------------------------- load


def load_options(options: argparse.Namespace, url: str) -> argparse.Namespace:
    """The load test's own options for this workload."""
    arguments = ["shared-prefix", "--url", url, "--seed", str(SEED), "--ignore-eos", "--completions"]
    for name in ("prefix_tokens", "prompt_tokens", "max_tokens", "timeout"):
        arguments += ["--" + name.replace("_", "-"), str(getattr(options, name))]
    arguments += ["--concurrency", str(options.streams), "--requests", str(options.streams)]
    return parse_load(arguments)


async def measure_side(side: Side, options: argparse.Namespace, log: Path, waves: int) -> list[Run]:
    """Start, warm, measure and stop one server. What every wave shares is warm, its endings are new."""
    with serving(side, log) as url:
        load = load_options(options, url)
        load.model = side.model
        async with connected(load) as http:
            await wait_until_ready(http, url, log, options.start_timeout)
            client = Client(http, await find_model(http, load), load)
            stock = sessions("shared-prefix", load, SEED)
            await LoadTest(client, stock, load).warm_up(1)
            await LoadTest(client, stock, load).warm_up(options.streams)
            runs = []
            for _ in range(waves):
                test = LoadTest(client, stock, load)
                await test.measure()
                runs.append(run_of(test.records))
            return runs


def run_of(records: Sequence[Record]) -> Run:
    """One wave in numbers. CannotBegin if a request of it failed: then the figures mean nothing."""
    failed = next((record for record in records if record.error), None)
    if failed is not None:
        raise CannotBegin(f"a request failed: {failed.error}: {failed.detail}")
    report = summarise(records, duration(records))
    return Run(
        report["output_tokens_per_second"],
        report["ttft_ms"]["p50"],
        report["inter_token_ms"]["p50"] or 0.0,
        report["cached_share"],
    )


async def measure(options: argparse.Namespace) -> dict[str, list[Run]]:
    """The runs of both sides, in turn; who comes first changes from round to round."""
    pair = sides(options)
    found: dict[str, list[Run]] = {side.name: [] for side in pair}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for side in pair if number % 2 == 0 else pair[::-1]:
                log = Path(folder) / "server.log"
                found[side.name] += await measure_side(side, options, log, options.waves)
                print(f"  round {number + 1}: {side.name}", file=sys.stderr, flush=True)
    return found


# ---------------------------------------------------------------- report


def rows_of(found: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """A line of medians a side."""

    def median(runs: Sequence[Run], field: Callable[[Run], float]) -> float:
        return statistics.median(field(run) for run in runs)

    return [
        {
            "server": name,
            "runs": len(runs),
            "output tokens/s": median(runs, lambda run: run.tokens_per_s),
            "TTFT ms": median(runs, lambda run: run.ttft_ms),
            "ITL ms": median(runs, lambda run: run.itl_ms),
            "cached %": None if runs[0].cached is None else 100 * median(runs, lambda run: run.cached or 0.0),
        }
        for name, runs in found.items()
    ]


def bars_of(found: Mapping[str, Sequence[Run]], options: argparse.Namespace) -> list[Bar]:
    """The one bar that the two sides are there for; none where the user compares settings of his own."""
    first, second = ([run.tokens_per_s for run in runs] for runs in found.values())
    gain = ratio_interval(first, second)
    if options.peer_url or options.peer_command:
        return [at_least("output tokens/s, headwater / peer", 1.5, gain.median, note=f", {gain}")]
    if (options.a, options.b) == (DEFAULT_A, DEFAULT_B):
        return [at_least("output tokens/s, auto / off", 1.15, gain.median, note=f", {gain}")]
    print(f"output tokens/s, A / B: {gain}")
    return []


DEFAULT_A = ["HEADWATER_CASCADE=auto"]
DEFAULT_B = ["HEADWATER_CASCADE=off"]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--a", nargs="*", default=DEFAULT_A, metavar="NAME=VALUE", help="environment of A")
    add("--b", nargs="*", default=DEFAULT_B, metavar="NAME=VALUE", help="environment of B, without a peer")
    peer = parser.add_mutually_exclusive_group()
    peer.add_argument("--peer-url", metavar="URL", help="base URL of a running server to take as B")
    peer.add_argument("--peer-command", metavar="COMMAND", help="what starts B; {port} is filled in")
    add("--peer-model", metavar="NAME", help="default: the first that the peer lists")
    add("--streams", type=int, default=16)
    add("--prefix-tokens", type=int, default=5000, help="words that all streams share")
    add("--prompt-tokens", type=int, default=20, help="words that each has of its own")
    add("--max-tokens", type=int, default=64)
    add("--rounds", type=int, default=4, help="starts of each server")
    add("--waves", type=int, default=3, help="measured waves a start")
    add("--timeout", type=float, default=600.0, help="seconds, for one request")
    add("--start-timeout", type=float, default=300.0, help="seconds, for a server to start")
    add("--json", metavar="FILE", help="write all runs and the bars here")
    options = parser.parse_args(arguments)
    for setting in (*options.a, *options.b):
        if "=" not in setting:
            parser.error(f"{setting} is not NAME=VALUE")
    return options


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are stopped on the way out
    try:
        found = asyncio.run(measure(options))
    except KeyboardInterrupt:
        return 130
    except CannotBegin as error:
        print(error, file=sys.stderr)
        return 2
    print(table(rows_of(found)) + "\n")
    bars = bars_of(found, options)
    if options.json:
        runs = {name: [run._asdict() for run in side] for name, side in found.items()}
        report = {"options": vars(options), "runs": runs, "bars": [bar._asdict() for bar in bars]}
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report_bars(bars)


if __name__ == "__main__":
    sys.exit(main())
