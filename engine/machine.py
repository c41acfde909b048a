"""What this process may use of the machine: CPUs, memory and instruction sets. Linux files only, no torch.

A container's limits are in its control group, not in the CPU count or the installed memory. Both versions
of control groups are read, the process's own group and all above it, because each limits what is below.
Every function takes the root of the file system, so that tests can bring their own.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_ROOT = Path("/")
# Limits at or above this many bytes mean "no limit" in version 1.
_UNLIMITED = 1 << 60
# Instruction sets that decide which kernels run, hence which bits come out.
_FEATURES = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "avx_vnni",
    "asimd",
    "bf16",
    "i8mm",
    "sve",
)

# Rounds (about half a millisecond in all) that a compute thread spins at a barrier before it sleeps.
_SPINS = "10000"


def calm_openmp() -> None:
    """Let compute threads sleep soon when they wait for each other; call before torch is imported.

    By default they spin for several ms. As soon as anything else wants one of the cores, the thread that
    all wait for is not running, and each of the hundreds of barriers of a step costs a time slice: measured
    with one busy neighbour on 2 cores, a step's linears take 1,200 ms instead of 95. On a quiet machine the
    gaps between operations are shorter than what is still spun. What the user has set is kept.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = _SPINS


def cache_dir() -> Path:
    """The user's folder for what can be had again: HEADWATER_CACHE_DIR, else `headwater` in the XDG cache."""
    own = os.environ.get("HEADWATER_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headwater"


def usable_cpus(root: Path = _ROOT, affinity: int | None = None) -> int:
    """CPUs this process may keep busy: its affinity, cut by the CPU quota of its control groups, 1 or more.

    A quota of 2.5 CPUs gives 2: a third thread would be throttled, and the others would wait for it.
    """
    if affinity is None:
        affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [*_quotas_v2(root), *_quotas_v1(root)]
    return max(1, min([affinity, *(int(quota) for quota in quotas)]))


def memory_limit(root: Path = _ROOT) -> int:
    """Bytes of memory this process may have: the machine's, or the least limit of its control groups."""
    limits = [limit for folder in _groups(root, "memory") for limit in _limit(folder)]
    return min([_meminfo(root, "MemTotal"), *limits])


def available_memory(root: Path = _ROOT) -> int:
    """Bytes that can still be taken without swapping or being killed, caches of files counted as free."""
    free = [_meminfo(root, "MemAvailable")]
    for folder in _groups(root, "memory"):
        for limit in _limit(folder):
            free.append(limit - _used(folder))
    return max(0, min(free))


def cpu_features(root: Path = _ROOT) -> tuple[str, ...]:
    """Which instruction sets that matter here the CPU has, in a fixed order."""
    flags: set[str] = set()
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            flags = set(value.split())
            break
    return tuple(feature for feature in _FEATURES if feature in flags)


def cpu_identity(root: Path = _ROOT) -> tuple[str, ...]:
    """What decides the code that a compiler makes for this CPU: its model and all it can do."""
    wanted = ("vendor_id", "cpu family", "model", "model name", "flags", "Features")
    first = (_read(root / "proc/cpuinfo") or "").split("\n\n")[0]
    lines = (line.partition(":") for line in first.splitlines())
    return tuple(f"{name.strip()}={value.strip()}" for name, _, value in lines if name.strip() in wanted)


def fingerprint(parts: Sequence[str]) -> str:
    """A short name for everything that decides the bits of a result: equal parts, equal name."""
    framed = "".join(f"{len(part)}:{part}" for part in parts)
    return "fp_" + hashlib.sha256(framed.encode()).hexdigest()[:12]


def _quotas_v2(root: Path) -> Iterator[float]:
    for folder in _groups(root, ""):
        quota, _, period = (_read(folder / "cpu.max") or "max").partition(" ")
        if quota.isdigit() and period.strip().isdigit():
            yield int(quota) / int(period)


def _quotas_v1(root: Path) -> Iterator[float]:
    for folder in _groups(root, "cpu"):
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota is not None and period is not None and quota > 0 and period > 0:
            yield quota / period


def _limit(folder: Path) -> Iterator[int]:
    """The memory limit that a group sets, if it sets one."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        limit = _number(folder / name)
        if limit is not None and limit < _UNLIMITED:
            yield limit


def _used(folder: Path) -> int:
    """Bytes a group uses, without cached file pages that can be dropped."""
    used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
    stat = dict(
        line.split()[:2] for line in (_read(folder / "memory.stat") or "").splitlines() if " " in line
    )
    return used - int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the process's control groups that may limit `controller`, in both versions; each exists
    or not. "" is version 2 alone. Inside a container the path may not be visible: its root then counts."""
    mount = root / "sys/fs/cgroup"
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts = [mount, mount / "unified"]
        elif controller and controller in controllers.split(","):
            mounts = [mount / controllers, mount / controller]
        else:
            continue
        names = [part for part in path.split("/") if part and part != ".."]
        for base in mounts:
            for depth in range(len(names), -1, -1):
                yield base.joinpath(*names[:depth])


def _meminfo(root: Path, field: str) -> int:
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"no {field} in {root / 'proc/meminfo'}")


def _number(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
