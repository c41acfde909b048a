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
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from loadtest_report import KINDS, Record, duration, plot, summarise, table
from loadtest_workloads import Session, sessions

try:
    import aiohttp
except ImportError:
    sys.exit("The load test needs aiohttp: run it with the Python that has it (.venv/bin/python here).")


class CannotBegin(Exception):
    """The test can't start; the message says why and what to do."""


# ---------------------------------------------------------------- one request


class Refused(Exception):
    """A request failed in a way that has a name."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(detail)
        self.kind = kind


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Split server-sent events into the data of each; comments and other fields are skipped."""
    pending, data = b"", []
    async for chunk in chunks:
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" ").decode("utf-8", "replace"))
            elif not line and data:
                yield "\n".join(data)
                data = []
    if data:
        yield "\n".join(data)


class Client:
    """Sends conversations to one endpoint and times what comes back."""

    def __init__(self, http: aiohttp.ClientSession, model: str, options: argparse.Namespace) -> None:
        self._http = http
        self._options = options
        self._path = f"{options.url}/{'chat/completions' if options.chat else 'completions'}"
        self._body = {
            "model": model,
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.ignore_eos:
            self._body["ignore_eos"] = True

    async def ask(self, session: Session, replies: Sequence[str]) -> Record:
        """Send the turn after `replies`, and read its stream to the end."""
        body = {**self._body, **self._prompt(session, replies)}
        record = Record(session.kind, time.perf_counter())
        try:
            async with self._http.post(self._path, json=body) as response:
                if response.status != 200:
                    raise Refused(f"http {response.status}", _message(await response.text(errors="replace")))
                await self._read(response, record)
        except Refused as refused:
            record.error, record.detail = refused.kind, str(refused)
        except TimeoutError:
            record.error, record.detail = "timeout", f"not done after {self._options.timeout:g} s"
        except aiohttp.ClientConnectorError as error:
            record.error, record.detail = "connect", str(error)
        except aiohttp.ClientError as error:
            record.error, record.detail = "disconnected", str(error) or type(error).__name__
        record.ended = time.perf_counter()
        return record

    def _prompt(self, session: Session, replies: Sequence[str]) -> dict[str, Any]:
        messages = [{"role": "system", "content": session.system}] if session.system else []
        for turn, text in enumerate(session.turns[: len(replies) + 1]):
            messages.append({"role": "user", "content": text})
            if turn < len(replies):
                messages.append({"role": "assistant", "content": replies[turn]})
        if self._options.chat:
            return {"messages": messages}
        return {"prompt": "\n".join(f"{m['content']}" for m in messages) + "\n"}

    async def _read(self, response: aiohttp.ClientResponse, record: Record) -> None:
        finished = False
        async for data in events(response.content.iter_any()):
            if data.strip() == "[DONE]":
                finished = True
                continue
            try:
                finished |= _take(json.loads(data), record)
            except (ValueError, TypeError, AttributeError):
                raise Refused("bad event", data[:100]) from None
        if not finished:
            raise Refused("cut short", "the stream ended without a finish reason")


def _take(event: dict[str, Any], record: Record) -> bool:
    """Note what one event brings, and say whether it finishes the reply."""
    if event.get("error"):
        raise Refused("error event", _message(json.dumps(event)))
    _note_usage(event.get("usage"), record)
    finished = False
    for choice in event.get("choices") or ():
        finished |= choice.get("finish_reason") is not None
        if text := _text_of(choice):
            record.arrivals.append(time.perf_counter())
            record.text += text
    return finished


def _text_of(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    parts = (choice.get("text"), delta.get("reasoning_content"), delta.get("content"))
    return "".join(part for part in parts if part)


def _note_usage(usage: Any, record: Record) -> None:
    """Take usage from whichever event brings it: the finish chunk, or one without choices after it."""
    if isinstance(usage, dict):
        record.prompt_tokens = usage.get("prompt_tokens")
        record.completion_tokens = usage.get("completion_tokens")
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def _message(text: str) -> str:
    """Find the human part of an error body."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        error = json.loads(text)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    return " ".join(text.split())[:200]


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


async def find_model(http: aiohttp.ClientSession, options: argparse.Namespace) -> str:
    """Ask the server for its models: which also shows that it is there."""
    try:
        async with http.get(f"{options.url}/models", timeout=aiohttp.ClientTimeout(total=10)) as response:
            status, text = response.status, await response.text()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        reason = str(error) or "no answer in 10 s"
        raise CannotBegin(f"No server answers at {options.url}: {reason}. Start it, or give --url.") from None
    if status in (401, 403):
        raise CannotBegin(f"{options.url} refuses access ({status}): {_message(text)}. Give --api-key.")
    if options.model:
        return str(options.model)
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return str(json.loads(text)["data"][0]["id"])
    raise CannotBegin(f"{options.url}/models lists no model (status {status}). Give --model.")


async def run(options: argparse.Namespace) -> tuple[list[Record], dict[str, Any]]:
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    timeout = aiohttp.ClientTimeout(total=options.timeout)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as http:
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
