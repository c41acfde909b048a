"""Tries grammars in a child process, so that none can hang, crash or fill the server."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import select
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import EngineUnavailable, Overloaded, RequestError

logger = logging.getLogger(__name__)

# In the matcher's errors: where in its own notation, which clients did not write.
_NOISE = re.compile(r"\d+ \||\^+$")
_PLACE = re.compile(r"(at )?\d+\(\d+\): (failed to compile JSON schema: )?")

_SCRIPT = Path(__file__).with_name("grammar_child.py")


class TrialLimits(NamedTuple):
    """What a trial may take: CPU seconds, wall seconds on a busy machine, and the wait for its turn."""

    cpu: float = 2.0
    wall: float = 10.0
    turn: float = 20.0


class Trial:
    """A child process that compiles one grammar at a time, started when first needed.

    `setup` gives what the child needs: the vocabulary and how long it may take. Safe in several threads.
    """

    def __init__(self, setup: Callable[[], dict[str, Any]], limits: TrialLimits) -> None:
        self._setup = setup
        self._limits = limits
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._stop: weakref.finalize[..., Any] | None = None

    def run(self, grammar: str, limits: Mapping[str, Any]) -> float:
        """Return the CPU seconds that compiling took. `limits` are the matcher's.

        Raises RequestError where the grammar is bad or takes too much, Overloaded where too many wait.
        """
        if not self._lock.acquire(timeout=self._limits.turn):
            raise Overloaded("too many grammars are being compiled; try again later")
        try:
            answer = self._ask({"grammar": grammar, "limits": limits})
        finally:
            self._lock.release()
        if answer is None:
            raise RequestError("it is too complex: compiling it takes more than the time or memory allowed")
        if error := answer["error"]:
            raise RequestError(_in_words(error))
        return float(answer["seconds"])

    def close(self) -> None:
        """End the child process; the next run starts another."""
        if self._stop is not None:
            self._stop()
        self._child = self._stop = None

    def _ask(self, question: dict[str, Any]) -> dict[str, Any] | None:
        """The child's answer, or None where it died of the grammar, or had to."""
        if self._child is None or self._child.poll() is not None:
            self._start()
        if not self._send(question):  # it died while it had nothing to do, so not of this grammar
            self._start()
            if not self._send(question):
                raise EngineUnavailable("the process that checks grammars does not run")
        line = self._receive()
        if not line:
            logger.warning("A grammar of %d characters took too much to compile", len(question["grammar"]))
            self.close()
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _start(self) -> None:
        self.close()
        try:
            child = subprocess.Popen(
                [sys.executable, "-P", str(_SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt at the terminal is for the server
            )
        except OSError as error:
            raise EngineUnavailable(f"the process that checks grammars can't start: {error}") from None
        self._child, self._stop = child, weakref.finalize(self, _end, child)
        if not self._send(self._setup()):
            raise EngineUnavailable("the process that checks grammars does not run")

    def _send(self, value: Any) -> bool:
        assert self._child is not None
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(value).encode() + b"\n")
            self._child.stdin.flush()
        except OSError:
            return False
        return True

    def _receive(self) -> bytes:
        """One line; empty where the child ended or took too long."""
        assert self._child is not None
        assert self._child.stdout is not None
        ready, _, _ = select.select([self._child.stdout], [], [], self._limits.wall)
        return self._child.stdout.readline() if ready else b""


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # unsent bytes for a process that is gone
                pipe.close()


def _in_words(error: str) -> str:
    """The matcher's error for clients: what it says of its own options, notation and state is left out."""
    following = error.startswith("follow: ")
    lines = [line.strip() for line in error.removeprefix("follow: ").splitlines()]
    lines = [line for line in lines if line and line != "<non-verbose/>" and not _NOISE.match(line)]
    if lines and lines[-1].startswith("error: "):  # what a bad pattern lacks, after all of it
        lines = [*(line[:100] for line in lines[:2]), lines[-1]]
    text = _PLACE.sub("", " ".join(lines))[:300]
    if following:
        return "no text satisfies it" if "NoExtension" in text else f"it is too complex to follow: {text}"
    if text.startswith("oneOf"):
        return "oneOf can't be enforced where one value may match two of its schemas; use anyOf"
    return text
