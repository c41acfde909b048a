"""Compile the CPU kernel at first use, for this very CPU, into the user's cache folder.

A wheel can't hold it: what pays are the instruction sets of the machine that runs it. The result is kept
under a name made of source, flags, compiler and CPU, so that a change of any of them compiles anew.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from engine import machine
from engine.errors import KernelUnavailable

logger = logging.getLogger(__name__)

_SOURCE = "cpu.cpp"
_FLAGS = (
    "-std=c++20",
    "-O3",
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-fno-math-errno",
    "-ffp-contract=off",  # a product and a sum are one rounding only where the source says so
)
_TIMEOUT_S = 300.0
# Folders to compile in. One that is older than this is nobody's: its process was killed.
_PREFIX = "tmp"
_STALE_S = 3600.0
_COMPILERS = ("g++", "clang++", "c++")

# What this process compiles at the moment, for `interrupt`: one kernel at a time.
_building = threading.Lock()
_processes: set[subprocess.Popen[str]] = set()


def build(architecture: str = "native") -> Path:
    """The compiled kernel, compiled now if this source, compiler and CPU never met before.

    `architecture` is what the compiler's -march takes: "x86-64-v3" leaves AVX-512 aside. Raises
    KernelUnavailable, in one line, where there is no compiler or it fails.
    """
    command = [*find_compiler(), *_FLAGS, f"-march={architecture}"]
    with _building:
        folder, key = machine.cache_dir() / "kernels", _key(command)
        for path in folder.glob(f"cpu-{key}-*.so"):
            if path.name == _name(key, path):
                return path
            logger.warning("%s is damaged: compiling it anew", path)
            path.unlink(missing_ok=True)
        return _compile(command, folder, key)


def interrupt() -> None:
    """End what another thread compiles, if anything: its `build` raises, and on return its files are gone."""
    for _ in range(100):  # 2 s: the disk may hang
        if _building.acquire(timeout=0.02):
            _building.release()
            break
        for process in tuple(_processes):
            _kill(process)


def sources() -> list[Path]:
    """The kernel's files, in a fixed order."""
    folder = Path(__file__).parent
    return [*sorted(folder.glob("*.h")), folder / _SOURCE]


def find_compiler() -> list[str]:
    """The C++ compiler, and flags that CXX may bring: CXX where it is set, else the first of the usual names.

    Raises KernelUnavailable where there is none.
    """
    wanted = shlex.split(os.environ.get("CXX", ""))
    for name in wanted[:1] or _COMPILERS:
        found = shutil.which(name)
        if found:
            return [found, *wanted[1:]]
    if wanted:
        raise KernelUnavailable(f"no C++ compiler: CXX={os.environ['CXX']} is not found")
    raise KernelUnavailable(f"no C++ compiler: none of {', '.join(_COMPILERS)} is found")


def _key(command: list[str]) -> str:
    version = _run([command[0], "--version"]).splitlines()[:1]
    digest = hashlib.sha256("\0".join([*command, *version, *machine.cpu_identity()]).encode())
    for path in sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _name(key: str, path: Path) -> str:
    """The name of a whole file: it ends in a hash of the content, as loading a damaged one can kill us."""
    return f"cpu-{key}-{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}.so"


def _compile(command: list[str], folder: Path, key: str) -> Path:
    """Compile beside the target and rename, so that nobody ever loads half a file."""
    started = time.perf_counter()
    logger.info("compiling the CPU kernel for this CPU, once")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=folder) as work:
            made = Path(work) / "kernel.so"
            _run([*command, str(Path(__file__).parent / _SOURCE), "-o", str(made)], TMPDIR=work)
            if not made.exists():
                raise KernelUnavailable(f"{command[0]} made no file")
            with made.open("rb+") as file:
                os.fsync(file.fileno())
            target = made.replace(folder / _name(key, made))
    except OSError as error:
        raise KernelUnavailable(f"can't write to {folder}: {error}") from None
    logger.info("compiled the CPU kernel in %.1f s: %s", time.perf_counter() - started, target)
    return target


def _sweep(folder: Path) -> None:
    """Remove what a process that was killed while it compiled has left."""
    for left in folder.glob(_PREFIX + "*"):
        with suppress(OSError):  # another start sweeps too
            if time.time() - left.stat().st_mtime > _STALE_S:
                shutil.rmtree(left)


def _run(command: list[str], **environment: str) -> str:
    """Its output. In a session of its own: an interrupt is for the server to act on, not for the compiler."""
    try:
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C", **environment},
            start_new_session=True,
        ) as process:
            _processes.add(process)
            try:
                said, complaint = process.communicate(timeout=_TIMEOUT_S)
            finally:
                _processes.discard(process)
                _kill(process)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelUnavailable(f"{command[0]} can't be run: {error}") from None
    if process.returncode:
        logger.debug("%s says: %s", command[0], complaint)
        lines = complaint.splitlines() or [f"status {process.returncode}"]
        reason = next((line for line in lines if "error" in line or "No space" in line), lines[0])
        raise KernelUnavailable(f"{command[0]} failed: {reason}")
    return said


def _kill(process: subprocess.Popen[str]) -> None:
    """End a compiler that still runs, and the processes that do its work."""
    with suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
