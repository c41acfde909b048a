"""Compile the CPU kernel at first use, for this very CPU, into the user's cache folder.

A wheel can't hold it: what pays are the instruction sets of the machine that runs it. The result is kept
under a name made of source, flags, compiler and CPU, so that a change of any of them compiles anew.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
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
_COMPILERS = ("g++", "clang++", "c++")


def build(architecture: str = "native") -> Path:
    """The compiled kernel, compiled now if this source, compiler and CPU never met before.

    `architecture` is what the compiler's -march takes: "x86-64-v3" leaves AVX-512 aside. Raises
    KernelUnavailable, in one line, where there is no compiler or it fails.
    """
    compiler = find_compiler()
    flags = (*_FLAGS, f"-march={architecture}")
    target = machine.cache_dir() / "kernels" / f"cpu-{_key(compiler, flags)}.so"
    if not target.exists():
        _compile(compiler, flags, target)
    return target


def sources() -> list[Path]:
    """The kernel's files, in a fixed order."""
    folder = Path(__file__).parent
    return [*sorted(folder.glob("*.h")), folder / _SOURCE]


def find_compiler() -> str:
    """Path of the C++ compiler: CXX where it is set, else the first of the usual names.

    Raises KernelUnavailable where there is none.
    """
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else _COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    raise KernelUnavailable(f"no C++ compiler ({wanted or ', '.join(_COMPILERS)})")


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    version = _run([compiler, "--version"]).splitlines()[:1]
    parts = [*flags, compiler, *version, *machine.cpu_identity()]
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: str, flags: tuple[str, ...], target: Path) -> None:
    """Compile beside the target and rename, so that nobody ever loads half a file."""
    started = time.perf_counter()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            made = Path(work) / target.name
            _run([compiler, *flags, str(Path(__file__).parent / _SOURCE), "-o", str(made)])
            made.replace(target)
    except OSError as error:
        raise KernelUnavailable(f"can't write {target}: {error}") from None
    logger.info("compiled the CPU kernel in %.1f s: %s", time.perf_counter() - started, target)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelUnavailable(f"{command[0]} can't be run: {error}") from None
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if "error" in line), "no reason given")
        raise KernelUnavailable(f"{command[0]} failed: {reason}")
    return done.stdout
