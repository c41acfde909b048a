"""scripts/bootstrap.sh on small trees of its own: real interpreters, real pip, wheels made here."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PYPROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "headwater"
version = "1.0"
dependencies = ["torch"]
optional-dependencies = { dev = ["extra-package"] }
"""

# A build backend that needs no download: the project's own wheel is its metadata alone.
BACKEND = """\
import zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    info = "headwater-1.0.dist-info/"
    name = "headwater-1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: headwater\\nVersion: 1.0\\n"
            "Provides-Extra: dev\\nRequires-Dist: torch\\nRequires-Dist: extra-package; extra == 'dev'\\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "")
    return name

build_wheel = build_editable
"""


class Tree:
    """A folder with the script, a tiny project, and wheels that stand for the package index."""

    def __init__(self, root: Path) -> None:
        self.folder = folder = root / "a tree"
        self.wheels = root / "wheels"
        (folder / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "bootstrap.sh", folder / "scripts")
        (folder / "pyproject.toml").write_text(PYPROJECT)
        (folder / "backend.py").write_text(BACKEND)
        (folder / "constraints.txt").write_text("torch==2.13.0\n")
        for name, version in (("torch", "2.12.0"), ("torch", "2.13.0"), ("torch", "2.14.0")):
            self.add_wheel(name, version)
        self.add_wheel("extra_package", "1.0")

    def add_wheel(self, name: str, version: str, needs: str = "") -> None:
        self.wheels.mkdir(exist_ok=True)
        info = f"{name}-{version}.dist-info/"
        with zipfile.ZipFile(self.wheels / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            wheel.writestr(info + "METADATA", metadata + (f"Requires-Dist: {needs}\n" if needs else ""))
            wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(info + "RECORD", "")

    def start(self, *extras: str, **env: str) -> subprocess.Popen[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "HEADWATER_", "PYTHON"))}
        # The interpreter under test goes first, and no index but the wheels above is asked.
        path = f"{Path(sys.executable).parent}{os.pathsep}{clean['PATH']}"
        clean |= {"PATH": path, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        clean |= {"PIP_FIND_LINKS": str(self.wheels), "PIP_RETRIES": "0"}
        if "HEADWATER_TORCH_INDEX" not in env:
            clean["PIP_NO_INDEX"] = "1"
        return subprocess.Popen(
            ["bash", str(self.folder / "scripts" / "bootstrap.sh"), *extras],
            env=clean | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *extras: str, **env: str) -> tuple[int, str]:
        """Return the exit code and what was said; nothing may go to standard output."""
        process = self.start(*extras, **env)
        out, err = process.communicate(timeout=120)
        assert out == ""
        return process.returncode, err

    def installed(self) -> dict[str, str]:
        code = "import importlib.metadata as m\nfor d in m.distributions(): print(d.name, d.version)"
        python = self.folder / ".venv" / "bin" / "python"
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
        return dict(line.split() for line in done.stdout.splitlines())


@pytest.fixture(scope="module")
def set_up(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tree, list[str]]:
    """A tree that two runs set up at the same time, and what each of them said."""
    tree = Tree(tmp_path_factory.mktemp("bootstrap"))
    both = [tree.start(), tree.start()]
    said = [process.communicate(timeout=200)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    return tree, said


@pytest.fixture
def tree(set_up: tuple[Tree, list[str]]) -> Tree:
    return set_up[0]


def test_the_first_run_installs_the_constrained_torch_and_the_project(tree: Tree) -> None:
    assert tree.installed()["torch"] == "2.13.0"
    assert tree.installed()["headwater"] == "1.0"


def test_two_runs_at_once_do_the_work_once(set_up: tuple[Tree, list[str]]) -> None:
    _, said = set_up
    assert sorted("making" in words for words in said) == [False, True]
    assert sorted("installing" in words and "MB" in words for words in said) == [False, True]


def test_a_run_with_nothing_to_do_does_and_says_nothing(tree: Tree) -> None:
    before = sorted((p, p.lstat().st_mtime_ns) for p in tree.folder.rglob("*"))
    assert tree.run() == (0, "")
    assert sorted((p, p.lstat().st_mtime_ns) for p in tree.folder.rglob("*")) == before


def test_extras_are_added_and_kept_and_new_constraints_are_obeyed(tree: Tree) -> None:
    code, said = tree.run("dev")
    assert code == 0
    assert said.count("FlashInfer") == 1
    assert tree.installed()["extra_package"] == "1.0"
    assert tree.run() == (0, "")
    assert tree.run("dev") == (0, "")
    (tree.folder / "constraints.txt").write_text("torch==2.12.0\n")
    assert tree.run()[0] == 0
    assert tree.installed()["torch"] == "2.12.0"
    assert tree.run("dev") == (0, "")


def test_gpu_wrappers_come_with_dev_alone_and_without_what_they_declare(tree: Tree) -> None:
    """The folder of wheels holds nothing of the name that they need."""
    assert "flashinfer_python" not in tree.installed()
    for name in ("flashinfer_python", "apache_tvm_ffi", "nvidia_ml_py"):
        tree.add_wheel(name, "1.0", needs="huge-gpu-library")
    (tree.folder / "constraints.txt").write_text("torch==2.12.0\nflashinfer-python==1.0\n")
    code, said = tree.run("dev")
    assert code == 0
    here = (platform.system(), platform.machine()) == ("Linux", "x86_64")
    assert ("FlashInfer" in said) is not here
    assert ("flashinfer_python" in tree.installed()) is here


def test_a_run_that_failed_leaves_no_stamp_and_says_what_is_missing(tree: Tree) -> None:
    good = (tree.folder / "constraints.txt").read_text()
    (tree.folder / "constraints.txt").write_text("torch==9.9.9\n")
    for _ in range(2):
        code, said = tree.run()
        assert code == 1
        assert "the package index has no torch==9.9.9 for this Python and system" in said
    (tree.folder / "constraints.txt").write_text(good)
    assert tree.run()[0] == 0


def test_an_index_that_cannot_be_reached_is_told_in_plain_words(tree: Tree) -> None:
    (tree.folder / "constraints.txt").write_text("torch==9.9.9\n")
    # Port 9 of this machine: nothing listens there.
    code, said = tree.run(HEADWATER_TORCH_INDEX="http://127.0.0.1:9/simple")
    assert code == 1
    assert said.splitlines()[-1].startswith("headwater: the package index can't be reached")


TOOLS = ["bash", "dirname", "cat", "sed", "grep", "sha256sum", "awk", "df", "sort", "rm", "uname", "flock"]


def folder_of_tools(folder: Path, **scripts: str) -> str:
    """A PATH with the usual tools, no Python, and the given scripts."""
    folder.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        if found:
            (folder / tool).symlink_to(found)
    for name, body in scripts.items():
        # A tool that the test replaces must not be written through its link.
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    return str(folder)


OLD = 'case "$2" in *platform*) echo 3.9.2 ;; *) exit 1 ;; esac'
WITHOUT_VENV = f'case "$2" in *ensurepip*) exit 1 ;; *) exec {sys.executable} "$@" ;; esac'


@pytest.mark.parametrize(
    ("scripts", "words"),
    [
        ({}, "Python 3.11, 3.12 or 3.13 is needed; found: none."),
        ({"python3": OLD}, "Python 3.11, 3.12 or 3.13 is needed; found: python3 (3.9.2)."),
        ({"python3": WITHOUT_VENV}, "python3 is here, but not its venv module"),
    ],
)
def test_a_python_that_will_not_do_is_told_in_plain_words(
    tmp_path: Path, scripts: dict[str, str], words: str
) -> None:
    tree = Tree(tmp_path)
    code, said = tree.run(PATH=folder_of_tools(tmp_path / "bin", **scripts))
    assert code == 1
    assert said.startswith(f"headwater: {words}")
    assert said.count("\n") == 1
    assert not (tree.folder / ".venv").exists()


def test_a_full_disk_is_told_before_anything_is_downloaded(tree: Tree, tmp_path: Path) -> None:
    (tree.folder / "constraints.txt").write_text("torch==2.14.0\n")
    full = "echo header; echo 'disk 9999999 9900000 99999 99% /'"
    path = folder_of_tools(tmp_path / "bin", df=full, python3=f'exec {sys.executable} "$@"')
    code, said = tree.run(PATH=path)
    assert code == 1
    assert "has 97 MB free, and the packages need at least 2000 MB" in said.splitlines()[-1]
    assert tree.installed()["torch"] != "2.14.0"


def test_a_tree_that_was_moved_is_set_up_anew(tree: Tree) -> None:
    """The last test of this tree: it moves it."""
    (tree.folder / "constraints.txt").write_text("torch==2.13.0\n")
    assert tree.run()[0] == 0
    tree.folder = tree.folder.rename(tree.folder.with_name("another place"))
    code, said = tree.run()
    assert code == 0
    assert "making" in said
    assert tree.run() == (0, "")
