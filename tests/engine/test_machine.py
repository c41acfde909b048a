"""Limits are those of this process: its affinity and its control groups, not the machine's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine import machine

MB = 1 << 20


def fake(root: Path, files: dict[str, str]) -> Path:
    """A file system with 8 GB of memory, 6 GB of them available, and these files."""
    memory = "MemTotal:  8388608 kB\nMemFree: 1 kB\nMemAvailable:  6291456 kB\n"
    for name, text in {"proc/meminfo": memory, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_control_groups_the_affinity_and_the_memory_count(tmp_path: Path) -> None:
    root = fake(tmp_path, {})
    assert machine.usable_cpus(root, affinity=5) == 5
    assert machine.memory_limit(root) == 8192 * MB
    assert machine.available_memory(root) == 6144 * MB


@pytest.mark.parametrize(
    ("quota", "cpus"),
    [("max 100000", 16), ("400000 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("", 16)],
)
def test_a_quota_cuts_the_threads(tmp_path: Path, quota: str, cpus: int) -> None:
    root = fake(
        tmp_path, {"proc/self/cgroup": "0::/app/web\n", "sys/fs/cgroup/app/web/cpu.max": quota + "\n"}
    )
    assert machine.usable_cpus(root, affinity=16) == cpus
    assert machine.usable_cpus(root, affinity=1) == 1


def test_a_group_above_limits_too(tmp_path: Path) -> None:
    root = fake(
        tmp_path,
        {
            "proc/self/cgroup": "0::/app/web\n",
            "sys/fs/cgroup/app/cpu.max": "300000 100000\n",
            "sys/fs/cgroup/app/web/cpu.max": "max 100000\n",
            "sys/fs/cgroup/app/memory.max": f"{1024 * MB}\n",
            "sys/fs/cgroup/app/memory.current": f"{700 * MB}\n",
            "sys/fs/cgroup/app/memory.stat": f"anon 5\ninactive_file {200 * MB}\n",
            "sys/fs/cgroup/app/web/memory.max": "max\n",
        },
    )
    assert machine.usable_cpus(root, affinity=16) == 3
    assert machine.memory_limit(root) == 1024 * MB
    assert machine.available_memory(root) == 524 * MB


def test_inside_a_container_the_root_of_the_mount_counts(tmp_path: Path) -> None:
    """The path in /proc/self/cgroup is the host's; only its last part is mounted, as the root."""
    root = fake(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../../kubepods/pod1\n",
            "sys/fs/cgroup/cpu.max": "200000 100000\n",
            "sys/fs/cgroup/memory.max": f"{2048 * MB}\n",
        },
    )
    assert machine.usable_cpus(root, affinity=64) == 2
    assert machine.memory_limit(root) == 2048 * MB


def test_version_1_limits_are_read(tmp_path: Path) -> None:
    root = fake(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n1:name=systemd:/\n0::/\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": "350000\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": f"{512 * MB}\n",
            "sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes": f"{400 * MB}\n",
            "sys/fs/cgroup/memory/docker/x/memory.stat": f"total_inactive_file {100 * MB}\n",
        },
    )
    assert machine.usable_cpus(root, affinity=8) == 3
    assert machine.memory_limit(root) == 512 * MB
    assert machine.available_memory(root) == 212 * MB


def test_no_quota_of_version_1_is_no_limit(tmp_path: Path) -> None:
    root = fake(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu:/\n4:memory:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert machine.usable_cpus(root, affinity=8) == 8
    assert machine.memory_limit(root) == 8192 * MB


def test_a_group_that_is_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {"memory.max": f"{MB}\n", "memory.current": f"{2 * MB}\n"}
    root = fake(
        tmp_path,
        {"proc/self/cgroup": "0::/\n", **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}},
    )
    assert machine.available_memory(root) == 0


def test_cpu_features_are_those_that_decide_kernels(tmp_path: Path) -> None:
    root = fake(tmp_path, {"proc/cpuinfo": "processor: 0\nflags\t\t: fpu avx512_bf16 avx2 fma vme\n"})
    assert machine.cpu_features(root) == ("avx2", "fma", "avx512_bf16")
    assert machine.cpu_features(tmp_path / "nothing") == ()


def test_the_real_machine_has_cpus_and_memory() -> None:
    assert 1 <= machine.usable_cpus() <= len(os.sched_getaffinity(0))
    assert 0 < machine.available_memory() <= machine.memory_limit()


def test_fingerprints_differ_where_parts_do() -> None:
    names = {machine.fingerprint(parts) for parts in [("a", "b"), ("ab", ""), ("ab",), ("a", "b", "")]}
    assert len(names) == 4
    assert machine.fingerprint(("a", "b")) == machine.fingerprint(["a", "b"])


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_compute_threads_sleep_soon_unless_the_user_decides(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], spins: str | None
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    machine.calm_openmp()
    assert os.environ.get("GOMP_SPINCOUNT") == spins
