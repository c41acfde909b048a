"""The repository keeps its own promises: what a clone must hold, and what README and docs say of it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from server.settings import OTHER_VARIABLES, all_settings

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ["scripts/serve", "scripts/test", "scripts/bootstrap.sh", ".ci/run"]
FILES = [
    "LICENSE",
    "README.md",
    "CHANGELOG.md",
    "constraints.txt",
    "pyproject.toml",
    ".gitignore",
    "docs/settings.md",
    "docs/deployment.md",
    "docs/faults.md",
    "docs/gpu.md",
]
LARGEST_FILE = 2_000_000
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def committed() -> list[str]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [name for name in listing.split("\0") if name and (ROOT / name).exists()]


def sources() -> list[Path]:
    return sorted(path for package in ("engine", "server") for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("name", FILES)
def test_the_files_that_a_user_looks_for_are_there(name: str) -> None:
    assert (ROOT / name).stat().st_size > 0


def test_the_licence_is_apache_2() -> None:
    head = " ".join((ROOT / "LICENSE").read_text().split())[:60]
    assert head.startswith("Apache License Version 2.0, January 2004")
    assert PYPROJECT["project"]["license"] == "Apache-2.0"


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_can_be_run_and_parse(name: str) -> None:
    script = ROOT / name
    assert os.access(script, os.X_OK)
    assert script.read_text().startswith("#!/usr/bin/env bash\n")
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0


def test_no_weights_and_nothing_large_is_committed() -> None:
    weights = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".onnx", ".whl", ".npz")
    found = [n for n in committed() if n.endswith(weights) or (ROOT / n).stat().st_size > LARGEST_FILE]
    assert found == []


def test_every_folder_with_modules_is_a_package() -> None:
    """A folder without __init__.py would be missing from the wheel."""
    folders = {path.parent for path in sources()}
    assert [str(f) for f in folders if not (f / "__init__.py").exists()] == []


def test_constraints_pin_every_direct_dependency_and_name_no_place() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1] != "#"]
    pins = [re.fullmatch(r"([A-Za-z0-9._-]+)==[0-9][0-9a-z.]*", line) for line in lines]
    assert all(pins), [line for line, pin in zip(lines, pins, strict=True) if not pin]
    pinned = {normal(pin[1]) for pin in pins if pin}
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["plot"], *extras["dev"]]
    names = {normal(re.split(r"[\[<>=!~; ]", requirement)[0]) for requirement in wanted}
    assert names - {"headwater"} <= pinned


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_runtime_dependency_is_imported_and_every_import_is_declared() -> None:
    declared = {normal(re.split(r"[<>=]", d)[0]) for d in PYPROJECT["project"]["dependencies"]}
    imported = set()
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                imported.add(node.module.split(".")[0])
    foreign = {normal(name) for name in imported - sys.stdlib_module_names - {"engine", "server"}}
    assert foreign - {"flashinfer"} == declared


def test_the_default_and_the_dev_install_hold_nothing_for_gpus_but_torch() -> None:
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    wanted = " ".join([*project["dependencies"], *extras["plot"], *extras["dev"]]).lower()
    assert [word for word in ("flashinfer", "nvidia", "cuda", "triton", "tvm") if word in wanted] == []
    assert any(requirement.startswith("flashinfer-python") for requirement in extras["cuda"])


def test_flashinfer_is_imported_in_one_place() -> None:
    """Every other module gets it from there, so that one message tells where it is missing."""
    found = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [path.name for name in names if name.split(".")[0] == "flashinfer"]
    assert found == ["flashinfer_library.py"]


@pytest.mark.parametrize("package", ["engine.scheduling", "engine.cache"])
def test_planning_loads_no_torch(package: str) -> None:
    """Every module of the package, imported in a fresh process, leaves torch unloaded."""
    code = (
        "import importlib, pkgutil, sys\n"
        "package = importlib.import_module(sys.argv[1])\n"
        "names = [m.name for m in pkgutil.walk_packages(package.__path__, sys.argv[1] + '.')]\n"
        "assert names\n"
        "for name in names: importlib.import_module(name)\n"
        "loaded = {'torch', 'transformers', 'tokenizers', 'aiohttp'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, package],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_no_module_imports_gpu_libraries_at_its_top() -> None:
    gpu = {"flashinfer", "triton", "cuda", "pynvml", "cupy"}
    found = []
    for path in sources():
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [(path.name, name) for name in names if name.split(".")[0] in gpu]
    assert found == []


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", documents(), ids=lambda p: p.name)
def test_documents_name_only_variables_that_are_read(page: Path) -> None:
    known = {s.env for s in all_settings()} | set(OTHER_VARIABLES)
    assert set(re.findall(r"HEADWATER_[A-Z_]*[A-Z]", page.read_text())) <= known


def test_readme_names_only_flags_that_exist() -> None:
    """Flags of serve come from the settings; the rest must stand in the script or command they belong to."""
    known = {s.flag for s in all_settings()}
    elsewhere = "".join(
        (ROOT / name).read_text() for name in committed() if name.startswith(("scripts/", "server/cli"))
    )
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (ROOT / "README.md").read_text()))
    missing = [flag for flag in named - known - {"--help"} if f'"{flag}"' not in elsewhere]
    assert missing == []


@pytest.mark.parametrize("page", documents(), ids=lambda p: p.name)
def test_links_between_documents_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [t for t in targets if not (page.parent / t).exists()] == []


def test_nothing_of_one_machine_is_committed() -> None:
    """No home folders and no temporary ones in what is shipped or said."""
    own = re.compile(r"/(?:root|home/\w+|tmp)/")
    texts = [n for n in committed() if n.endswith((".py", ".md", ".toml", ".txt", ".sh")) and n != SELF]
    assert [n for n in texts if own.search((ROOT / n).read_text())] == []


SELF = "tests/test_repository.py"
