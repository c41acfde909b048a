"""A server of our own with a probe on its event loop: started by bench_loop.py, not by hand.

The probe sleeps a millisecond at a time and notes how late it wakes, and why: time that the loop's thread
computed itself, time that it was ready but had no core (another process had it), and the rest, in which it
waited for the interpreter's lock: that much of the rest in which another thread computed, it is to blame for.
A watchdog thread looks every few milliseconds at what the loop does while it is late. A line on stdin asks
for what was found since the line before: one JSON object on stdout.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

PERIOD = 0.001
LOOK = 0.004
"""Seconds between two looks of the watchdog."""
LATE_MS = 20.0
"""From here on what holds the loop is looked at."""
FRAMES = 4


class Clocks(NamedTuple):
    """A moment of one thread, in ms: the clock, what it has computed, how long it has waited for a core."""

    wall: float
    cpu: float
    queued: float


class Gap(NamedTuple):
    """Between two wakings of a thread that asked to sleep for less: how late it was, and why, in ms."""

    late: float
    computed: float
    queued: float

    @property
    def waited(self) -> float:
        """The rest: in which it waited for a lock, the interpreter's as a rule."""
        return max(0.0, self.late - self.computed - self.queued)


class ThreadClock:
    """Reads the clocks of the calling thread. Where the system tells no waits for cores, they are 0."""

    def __init__(self) -> None:
        self._stat = open_stat(threading.get_native_id())

    def read(self) -> Clocks:
        queued = 0.0 if self._stat is None else read_stat(self._stat)[1]
        return Clocks(1e3 * time.perf_counter(), 1e3 * time.thread_time(), queued)


def open_stat(native_id: int) -> int | None:
    """The scheduler's figures of a thread of this process, on Linux."""
    try:
        return os.open(f"/proc/self/task/{native_id}/schedstat", os.O_RDONLY)
    except OSError:
        return None


def read_stat(file: int) -> tuple[float, float]:
    """Ms on a core, and ms ready but without one."""
    on, queued = os.pread(file, 100, 0).split()[:2]
    return int(on) / 1e6, int(queued) / 1e6


def gap(before: Clocks, after: Clocks, asked: float) -> Gap:
    """What lies between two readings around a sleep of `asked` seconds."""
    late = after.wall - before.wall - 1e3 * asked
    return Gap(max(0.0, late), after.cpu - before.cpu, after.queued - before.queued)


class Figures:
    """What was found since the last question."""

    def __init__(self) -> None:
        self.gaps: list[Gap] = []
        self.held_ms = 0.0
        self.holder = ""
        self._stacks: Counter[str] = Counter()
        self._worst: tuple[Gap, str] | None = None

    @property
    def looked(self) -> bool:
        """Whether there was a look since the last gap."""
        return bool(self._stacks)

    def saw(self, stack: str) -> None:
        """Note what the loop was doing at a look while it was late."""
        self._stacks[stack] += 1

    def add(self, found: Gap) -> None:
        """Note how late the loop was; the looks since the last time are of this gap."""
        self.gaps.append(found)
        if self._stacks or found.late > LATE_MS:
            stack = self._stacks.most_common(1)[0][0] if self._stacks else ""
            if self._worst is None or found.computed > self._worst[0].computed:
                self._worst = found, stack
            self._stacks.clear()

    def holds(self, ms: float, holder: str) -> None:
        """Note that another thread kept the interpreter's lock for so long."""
        if ms > self.held_ms:
            self.held_ms, self.holder = ms, holder

    def report(self) -> dict[str, Any]:
        """All of it as plain data."""
        late = sorted(found.late for found in self.gaps) or [0.0]
        return {
            "wakings": len(self.gaps),
            "worst_ms": late[-1],
            "p99_ms": late[int(0.99 * (len(late) - 1))],
            "computed_ms": max((found.computed for found in self.gaps), default=0.0),
            "waited_ms": max((found.waited for found in self.gaps), default=0.0),
            "queued_ms": max((found.queued for found in self.gaps), default=0.0),
            "stack": self._worst[1] if self._worst else "",
            "held_ms": self.held_ms,
            "holder": self.holder,
        }


class Probe:
    """Runs on the loop; `figures` may be taken from any thread."""

    def __init__(self) -> None:
        self._loop_thread = threading.get_ident()
        self._figures = Figures()
        self._asleep_since: float | None = None
        self._collects_since = 0.0
        self._closed = threading.Event()

    @property
    def seen(self) -> bool:
        """Whether the loop is late now, and was looked at."""
        return self._figures.looked

    def take(self) -> Figures:
        """What was found since the last call."""
        found, self._figures = self._figures, Figures()
        return found

    async def run(self) -> None:
        """Measure until cancelled."""
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        gc.callbacks.append(self._collecting)
        clock, others = ThreadClock(), _Others()
        while True:
            others.begin()
            before = clock.read()
            self._asleep_since = before.wall
            await asyncio.sleep(PERIOD)
            found = gap(before, clock.read(), PERIOD)
            if found.waited > LATE_MS:
                thread, computed = others.busiest()
                self._figures.holds(min(found.waited, computed), thread)
            self._figures.add(found)

    def close(self) -> None:
        """Watch no more."""
        self._closed.set()
        gc.callbacks.remove(self._collecting)

    def _collecting(self, phase: str, info: dict[str, int]) -> None:
        # Whoever allocates at the wrong moment collects for all, and keeps the lock meanwhile.
        now = 1e3 * time.thread_time()
        if phase == "start":
            self._collects_since = now
        else:
            thread = threading.current_thread().name
            self._figures.holds(
                now - self._collects_since, f"garbage collection {info['generation']} in {thread}"
            )

    def _watch(self) -> None:
        while not self._closed.wait(LOOK):
            since = self._asleep_since
            if since is not None and 1e3 * time.perf_counter() - since > LATE_MS:
                self._figures.saw(shown(sys._current_frames().get(self._loop_thread)))


class _Others:
    """What the other threads of Python have computed lately."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}
        self._before: dict[int, float] = {}

    def begin(self) -> None:
        """From here on it counts."""
        self._before = self._read()

    def busiest(self) -> tuple[str, float]:
        """Where the thread that has computed most since `begin` is now, and how many ms that was."""
        now, frames = self._read(), sys._current_frames()
        found = [
            (now[thread.native_id] - self._before.get(thread.native_id, now[thread.native_id]), thread)
            for thread in threading.enumerate()
            if thread.native_id in now and thread.ident != threading.get_ident()
        ]
        if not found:
            return "", 0.0
        computed, thread = max(found, key=lambda pair: pair[0])
        return f"{thread.name}: {shown(frames.get(thread.ident or 0))}", computed

    def _read(self) -> dict[int, float]:
        found = {}
        for thread in threading.enumerate():
            number = thread.native_id
            if number is None:
                continue
            if number not in self._files and (file := open_stat(number)) is not None:
                self._files[number] = file
            try:
                found[number] = read_stat(self._files[number])[0]
            except (KeyError, OSError):
                if (gone := self._files.pop(number, None)) is not None:
                    os.close(gone)
        return found


def shown(frame: FrameType | None) -> str:
    """The innermost frames, ours if there are any: file:line function < caller."""
    found, ours = [], []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        text = f"{path.name}:{frame.f_lineno} {frame.f_code.co_name}"
        found.append(text)
        if {"engine", "server"} & set(path.parts) and "site-packages" not in path.parts:
            ours.append(text)
        frame = frame.f_back
    return " < ".join([*found[:1], *[text for text in ours if text != found[0]]][:FRAMES]) if found else ""


def answer(probe: Probe) -> None:
    """Answer each line of stdin."""
    for _ in sys.stdin:
        print(json.dumps(probe.take().report()), flush=True)


async def serve() -> int:
    """Serve as `headwater serve` does, with settings from the environment."""
    from engine import EngineConfig
    from engine.config import load
    from server.config import ServerConfig
    from server.lifecycle import serve

    probe = Probe()
    measuring = asyncio.create_task(probe.run())
    threading.Thread(target=answer, args=(probe,), name="answers", daemon=True).start()
    try:
        return await serve(load(EngineConfig), load(ServerConfig))
    finally:
        measuring.cancel()
        probe.close()


def main() -> int:
    import uvloop

    return uvloop.run(serve())


if __name__ == "__main__":
    sys.exit(main())
