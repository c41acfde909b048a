"""The kernel is compiled once for this source, compiler and CPU, and its absence is told in one line."""

from __future__ import annotations

import os
import stat
import threading
import time
from pathlib import Path

import pytest

from engine import machine
from engine.errors import KernelUnavailable
from engine.kernels import build as building
from engine.kernels.library import Library, load_library
from tests.kernels import needs_kernel


def compiler(folder: Path, body: str) -> Path:
    """A program that stands for the compiler: it answers --version, then does `body`."""
    path = folder / "c++"
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "c++ 1.0" && exit\necho x >> {folder}/calls\n{body}\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder of its own, and a compiler that writes "made" to its output."""
    monkeypatch.setenv("HEADWATER_CACHE_DIR", str(tmp_path / "cache"))
    body = 'while [ "$1" != -o ]; do shift; done\necho made > "$2"'
    monkeypatch.setenv("CXX", str(compiler(tmp_path, body)))
    return tmp_path


def test_the_kernel_is_compiled_once(fake: Path) -> None:
    first = building.build()
    assert first.read_text() == "made\n"
    assert first.parent == fake / "cache" / "kernels"
    assert building.build() == first
    assert (fake / "calls").read_text() == "x\n"
    assert sorted(p.name for p in first.parent.iterdir()) == [first.name]


def test_another_source_compiler_or_cpu_compiles_anew(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {building.build()}
    changed = fake / "changed.h"
    changed.write_text("// changed")
    sources = building.sources()
    monkeypatch.setattr(building, "sources", lambda: [*sources, changed])
    names.add(building.build())
    monkeypatch.setattr(machine, "cpu_identity", lambda: ("model=another",))
    names.add(building.build())
    other = fake / "other"
    other.mkdir()
    monkeypatch.setenv("CXX", str(compiler(other, 'while [ "$1" != -o ]; do shift; done\necho made > "$2"')))
    names.add(building.build())
    assert len(names) == 4


def test_every_source_counts() -> None:
    """A header that the key leaves out would keep an old kernel alive."""
    folder = Path(building.__file__).parent
    assert set(building.sources()) == {*folder.glob("*.h"), *folder.glob("*.cpp")}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo 'x.h:3: error: no such thing' >&2\nexit 1", "failed: x.h:3: error: no such thing"),
        ("printf 'bad \\377 byte' >&2\nexit 1", "failed: bad"),
        ("exit 1", "failed: status 1"),
        ("kill -9 $$", "failed: status -9"),
        ("exit 0", "made no file"),
    ],
)
def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    fake: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    monkeypatch.setenv("CXX", str(compiler(fake, body)))
    with pytest.raises(KernelUnavailable, match=message) as raised:
        building.build()
    assert "\n" not in str(raised.value)
    assert list((fake / "cache" / "kernels").iterdir()) == []


def test_no_compiler_and_no_room_are_told(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fake / "file").touch()
    monkeypatch.setenv("HEADWATER_CACHE_DIR", str(fake / "file"))
    with pytest.raises(KernelUnavailable, match="can't write"):
        building.build()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KernelUnavailable, match=r"no C\+\+ compiler: CXX=no-such-compiler is not found"):
        building.build()


def test_a_file_that_is_no_library_is_told(tmp_path: Path) -> None:
    (tmp_path / "cpu.so").write_text("not a library")
    with pytest.raises(KernelUnavailable, match="can't load"):
        Library(tmp_path / "cpu.so")


def test_a_damaged_file_is_compiled_anew(fake: Path) -> None:
    """Truncated, or with other bytes in its middle: loading it could kill the process."""
    whole = building.build()
    for damage in (b"", b"mad", b"mado\n"):
        whole.write_bytes(damage)
        assert building.build() == whole
        assert whole.read_text() == "made\n"
    assert (fake / "calls").read_text() == "x\n" * 4


def test_what_a_killed_process_left_is_swept_but_not_what_may_be_in_use(fake: Path) -> None:
    """An hour is longer than any compiler is given."""
    folder = fake / "cache" / "kernels"
    for name, minutes in (("tmpold", 61), ("tmpnew", 59)):
        (folder / name).mkdir(parents=True)
        (folder / name / "half.so").touch()
        then = time.time() - 60 * minutes
        os.utime(folder / name, (then, then))
    made = building.build()
    assert sorted(p.name for p in folder.iterdir()) == sorted([made.name, "tmpnew"])


def test_an_interrupt_ends_the_compiler_with_its_children_and_its_files(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(compiler(fake, f"sleep 60 & echo $! > {fake}/child; wait")))
    refused: list[KernelUnavailable] = []

    def compiling() -> None:
        try:
            building.build()
        except KernelUnavailable as error:
            refused.append(error)

    thread = threading.Thread(target=compiling)
    thread.start()
    while not ((fake / "child").exists() and (fake / "child").read_text()):
        time.sleep(0.01)
    building.interrupt()
    assert list((fake / "cache" / "kernels").iterdir()) == []
    thread.join()
    assert len(refused) == 1
    child = Path("/proc", (fake / "child").read_text().strip(), "stat")
    assert not child.exists() or child.read_text().split()[2] == "Z"
    building.interrupt()  # nothing runs: nothing happens


@needs_kernel
def test_a_file_that_cannot_be_loaded_is_compiled_once_more(
    fake: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What the stand-in for a compiler makes is no library, the second time neither: that is told."""
    with pytest.raises(KernelUnavailable, match="can't load"):
        load_library()
    assert (fake / "calls").read_text() == "x\n" * 2
    assert "compiling the CPU kernel again" in caplog.text


def test_flags_may_come_with_the_compiler(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = building.build()
    monkeypatch.setenv("CXX", f"{fake / 'c++'} -m64")
    assert building.build() != plain


@needs_kernel
def test_the_kernel_shares_torchs_openmp() -> None:
    """Two runtimes would mean two teams of threads that fight for the same cores."""
    import torch

    torch.set_num_threads(torch.get_num_threads())
    load_library()
    mapped = {
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line
    }
    assert len(mapped) == 1
