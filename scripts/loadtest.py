#!/usr/bin/env python3
"""Load test for any OpenAI-compatible server: how fast are tokens, how much of the prompts is cached?

    scripts/loadtest.py shared-prefix --concurrency 16 --requests 200
    scripts/loadtest.py mixed --url http://host:8000/v1 --rate 4 --duration 60 --json - --plot out.png

Workloads. `shared-prefix`: requests in --groups groups, each under its own system prompt of
--prefix-tokens. `multi-turn`: conversations of --turns turns under such a prompt; each turn sends the
whole history, replies included. `no-sharing`: nothing in common. `mixed`: a third of each. Every user
turn has --prompt-tokens of its own. Sizes are counted in plain words, about a token each.

--concurrency keeps that many conversations going; --rate starts them at Poisson times instead. The same
--seed sends the same prompts, so a second run finds them cached; without it each run has its own.

Needs Python 3.11 and aiohttp; --plot needs matplotlib. Exit code: 0, 1 if no request succeeded, 2 if it
could not begin, 130 after ctrl-C (which reports what there is).
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import importlib.util
import json
import math
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from loadtest_client import CannotBegin, Client, connected, find_model
from loadtest_report import KINDS, Record, duration, plot, summarise, table
from loadtest_workloads import Session, sessions

# ---------------------------------------------------------------- driving


class LoadTest:
    """Holds conversations until a number of requests, or a time, is reached."""

    def __init__(self, client: Client, stock: Iterator[Session], options: argparse.Namespace) -> None:
        self.records: list[Record] = []
        self.running = 0
        self._client = client
        self._stock = stock
        self._options = options
        self._left = math.inf
        self._deadline = math.inf

    async def warm_up(self, requests: int) -> None:
        """Send the first requests of the workload without keeping what they saw."""
        self._left = requests
        await self._closed_loop()
        self.records.clear()

    async def measure(self) -> None:
        options = self._options
        self._left = math.inf if options.requests is None else options.requests
        if options.duration is not None:
            self._deadline = time.perf_counter() + options.duration
        await (self._open_loop() if options.rate else self._closed_loop())

    async def _closed_loop(self) -> None:
        async def worker() -> None:
            while not self._over():
                await self._converse()

        async with asyncio.TaskGroup() as group:
            for _ in range(self._options.concurrency):
                group.create_task(worker())

    async def _open_loop(self) -> None:
        rng = random.Random(f"{self._options.seed}/arrivals")
        due = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            while not self._over():
                group.create_task(self._converse())
                due += rng.expovariate(self._options.rate)
                # A late start does not push back the ones after it. Sleeping also lets the new task
                # take its share of what is left before the next look at it.
                await asyncio.sleep(max(min(due, self._deadline) - time.perf_counter(), 0))

    def _over(self) -> bool:
        return self._left <= 0 or time.perf_counter() >= self._deadline

    async def _converse(self) -> None:
        """Hold one conversation; turns that don't happen (an error, the end) go back into the pot."""
        session = next(self._stock)
        reserved = int(min(len(session.turns), self._left))
        self._left -= reserved
        replies: list[str] = []
        self.running += 1
        try:
            while len(replies) < reserved and time.perf_counter() < self._deadline:
                record = await self._client.ask(session, replies)
                self.records.append(record)
                replies.append(record.text)
                if record.error:
                    break
        finally:
            self.running -= 1
            self._left += reserved - len(replies)


async def show_progress(test: LoadTest, options: argparse.Namespace) -> None:
    """Draw a bar on the terminal until cancelled."""
    began = time.perf_counter()
    while True:
        seconds, done = time.perf_counter() - began, len(test.records)
        shares = [done / options.requests if options.requests else 0.0]
        shares.append(seconds / options.duration if options.duration else 0.0)
        filled = round(30 * min(max(shares), 1.0))
        failed = sum(record.error is not None for record in test.records)
        line = f"{done} done, {test.running} running, {failed} failed, {seconds:.0f} s"
        print(f"\r[{'#' * filled}{' ' * (30 - filled)}] {line}\x1b[K", end="", file=sys.stderr, flush=True)
        await asyncio.sleep(0.2)


# ---------------------------------------------------------------- command


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("workload", choices=(*KINDS, "mixed"))
    add("--url", default="http://127.0.0.1:8000/v1", help="base URL; without a path, /v1 is added")
    add("--model", help="default: the first that the server lists")
    add("--api-key", help="sent as a bearer token")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=_whole(1), default=8, metavar="N", help="conversations at once")
    load.add_argument("--rate", type=_positive, metavar="R", help="conversations started a second")
    add("--requests", type=_whole(1), metavar="N", help="stop after N requests (100 without --duration)")
    add("--duration", type=_positive, metavar="S", help="start nothing new after S seconds")
    add("--prompt-tokens", type=_whole(1), default=100, metavar="N", help="words of each user turn")
    add("--prefix-tokens", type=_whole(1), default=1000, metavar="N", help="words of each system prompt")
    add("--groups", type=_whole(1), default=1, metavar="N", help="different system prompts")
    add("--turns", type=_whole(1), default=4, metavar="N", help="turns of a multi-turn conversation")
    add("--max-tokens", type=_whole(1), default=64, metavar="N", help="tokens of a reply")
    add("--temperature", type=float, default=0.0, metavar="T")
    add("--ignore-eos", action="store_true", help="ask for replies of full length (not every server can)")
    style = parser.add_mutually_exclusive_group()
    style.add_argument("--chat", action="store_true", default=True, help="use chat completions (default)")
    style.add_argument("--completions", dest="chat", action="store_false", help="use text completions")
    add("--seed", type=int, help="of prompts and arrival times")
    add("--warmup", type=_whole(0), default=0, metavar="N", help="requests sent first and not counted")
    add("--timeout", type=_positive, default=300.0, metavar="S", help="for one request")
    add("--json", metavar="FILE", help="write the numbers as JSON; - is stdout")
    add("--plot", metavar="FILE.png", help="draw a picture")
    options = parser.parse_args(arguments)
    if options.requests is None and options.duration is None:
        options.requests = 100
    options.url = options.url.rstrip("/")
    if "://" not in options.url:
        options.url = f"http://{options.url}"
    if "/" not in options.url.split("://", 1)[1]:
        options.url += "/v1"
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(10**9)
    return options


def _whole(least: int) -> Any:
    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{text} is below {least}")
        return value

    return number


def _positive(text: str) -> float:
    if not 0 < (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


async def run(options: argparse.Namespace) -> tuple[list[Record], dict[str, Any]]:
    async with connected(options) as http:
        model = await find_model(http, options)
        stock = sessions(options.workload, options, options.seed)
        test = LoadTest(Client(http, model, options), stock, options)
        interrupted = await _until_done_or_interrupted(test, options)
    seconds = duration(test.records)
    kinds = collections.Counter(record.kind for record in test.records)
    report = {
        "format": 1,
        "workload": options.workload,
        "url": options.url,
        "model": model,
        "seed": options.seed,
        "options": {k: v for k, v in vars(options).items() if k not in ("api_key", "json", "plot")},
        "interrupted": interrupted,
        **summarise(test.records, seconds),
        "parts": {
            kind: summarise([r for r in test.records if r.kind == kind], seconds)
            for kind in kinds
            if len(kinds) > 1
        },
    }
    return test.records, report


async def _until_done_or_interrupted(test: LoadTest, options: argparse.Namespace) -> bool:
    async def work() -> None:
        if options.warmup:
            await test.warm_up(options.warmup)
        await test.measure()

    task = asyncio.create_task(work())
    loop = asyncio.get_running_loop()
    with contextlib.suppress(NotImplementedError):  # no signal handlers on Windows: ctrl-C just stops
        loop.add_signal_handler(signal.SIGINT, task.cancel)
    bar = asyncio.create_task(show_progress(test, options)) if sys.stderr.isatty() else None
    try:
        await task
    except asyncio.CancelledError:
        return True
    finally:
        with contextlib.suppress(NotImplementedError):
            loop.remove_signal_handler(signal.SIGINT)
        if bar is not None:
            bar.cancel()
            print("\r\x1b[K", end="", file=sys.stderr)
    return False


def check_outputs(options: argparse.Namespace) -> None:
    """Find out before the test, not after it, that its results can't be written."""
    for path in (options.json, options.plot):
        if path and path != "-" and not Path(path).absolute().parent.is_dir():
            raise CannotBegin(f"There is no folder for {path}.")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        raise CannotBegin("--plot needs matplotlib, which is not installed.")


def main() -> NoReturn:
    options = parse()
    try:
        check_outputs(options)
        records, report = asyncio.run(run(options))
    except CannotBegin as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    print(table(report), file=sys.stderr if options.json == "-" else sys.stdout)
    if options.json == "-":
        print(json.dumps(report, indent=2))
    elif options.json:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if options.plot:
        plot(records, report, options.plot)
    if report["interrupted"]:
        sys.exit(130)
    sys.exit(0 if report["succeeded"] else 1)


if __name__ == "__main__":
    main()
