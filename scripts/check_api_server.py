"""A server on a small random model, in a process of its own, for the time that a test takes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from check_api_model import write_model

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 120.0
# Replies are short unless a request says otherwise; queues are long, so that nothing is refused for load.
FLAGS = {
    "port": "0",
    "kv-gb": "0.05",
    "threads": "1",
    "executor": "torch",
    "tile": "64",
    "default-max-tokens": "8",
    "max-waiting": "100000",
    "log-level": "info",
}


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve a model written to `folder`; give the server's URL. Raises RuntimeError if it doesn't start."""
    model = folder / "model"
    model.mkdir()
    write_model(model)
    log = folder / "log"
    flags = [part for name, value in FLAGS.items() for part in ("--" + name, value)]
    command = [sys.executable, "-m", "server", "serve", "--model", str(model), *flags]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
    with log.open("wb") as stream:
        process = subprocess.Popen(command, cwd=ROOT, stdout=stream, stderr=stream, env=clean)
    try:
        yield _ready(process, log)
        if process.poll() is not None:
            raise RuntimeError(f"the server ended by itself:\n{_tail(log)}")
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ready(process: subprocess.Popen[bytes], log: Path) -> str:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        found = re.search(r"listening on (http://\S+)", log.read_text(errors="replace"))
        if found and _answers(found[1] + "/ready"):
            return found[1]
        time.sleep(0.05)
    raise RuntimeError(f"the server did not start:\n{_tail(log)}")


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        # Nobody answers, or not in time: loading takes all there is.
        return False


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])
