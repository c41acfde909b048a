"""The headwater command: flags made from the settings, plain words and exit codes when things go wrong."""

from __future__ import annotations

import io
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine import machine
from engine.config import Setting, settings
from server import __version__
from server.cli import main
from server.settings import OTHER_VARIABLES, STRUCTS, all_settings, markdown, show, unknown_variables
from server.tenancy.keys import Keys

ROOT = Path(__file__).resolve().parents[2]
JUDGED = [s for s in all_settings() if s.allowed != "any text"]


def run(*arguments: str, timeout: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does, in a process of its own, with no setting but `env`."""
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith("HEADWATER_") or k == "HEADWATER_CACHE_DIR"
    }
    clean = {**kept, "PYTHONPATH": str(ROOT), **env}
    command = [sys.executable, "-m", "server", *arguments]
    return subprocess.run(command, env=clean, capture_output=True, text=True, timeout=timeout, check=False)


def exit_code(arguments: str) -> int:
    """Run in this process; return the code even where argparse exits by itself."""
    try:
        return main(shlex.split(arguments))
    except SystemExit as stop:
        return int(stop.code or 0)


def test_version_is_the_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--version") == 0
    assert capsys.readouterr().out == f"headwater {__version__}\n"


def test_serve_help_shows_every_setting_with_variable_default_and_range(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code("serve --help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for s in all_settings():
        assert f"{s.flag} " in shown
        assert f"[{s.allowed}; default {show(s.default) or 'empty'}; {s.env}]" in shown
        assert s.help in shown


def test_engine_and_server_have_no_setting_in_common() -> None:
    names = [[s.field for s in settings(struct)] for _, struct in STRUCTS]
    assert not set(names[0]) & set(names[1])


@pytest.mark.parametrize(
    "arguments", ["--help", "serve --help", "settings", "settings --markdown", "keys new acme"]
)
def test_answers_without_loading_torch(arguments: str) -> None:
    code = (
        "import sys\nfrom server.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("setting", JUDGED, ids=lambda s: s.field)
def test_a_bad_flag_stops_the_start_with_one_line(
    setting: Setting, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(f"serve {setting.flag} nonesuch") == 2
    told = capsys.readouterr().err
    assert told == f"headwater: {setting.flag}='nonesuch' is not allowed: give {setting.allowed}\n"


@pytest.mark.parametrize("setting", JUDGED, ids=lambda s: s.field)
def test_a_bad_variable_stops_the_start_with_one_line(
    setting: Setting, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(setting.env, "nonesuch")
    assert exit_code("serve") == 2
    told = capsys.readouterr().err
    assert told == f"headwater: {setting.env}='nonesuch' is not allowed: give {setting.allowed}\n"


def test_an_unknown_flag_is_refused_and_never_taken_for_a_longer_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code("serve --por 9") == 2
    told = capsys.readouterr().err
    assert told.startswith("usage: headwater serve [--FLAG VALUE ...]\n")
    assert "unrecognized arguments: --por 9" in told
    assert exit_code("settings --nope") == 2
    assert "unrecognized arguments: --nope" in capsys.readouterr().err


def test_an_unknown_variable_is_told_with_its_nearest_neighbour() -> None:
    assert unknown_variables(["HEADWATER_PROT", "PORT", "HEADWATER_PORT"]) == [
        ("HEADWATER_PROT", "HEADWATER_PORT")
    ]
    assert unknown_variables(["HEADWATER_ZZQQXX"]) == [("HEADWATER_ZZQQXX", None)]


def test_variables_that_others_read_are_known() -> None:
    assert unknown_variables(OTHER_VARIABLES) == []
    assert set(OTHER_VARIABLES) == {"HEADWATER_TORCH_INDEX", "HEADWATER_CACHE_DIR", "CXX"}


def test_settings_prints_what_would_be_used(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWATER_PORT", "8123")
    assert exit_code("settings") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "HEADWATER_PORT=8123" in lines
    assert "HEADWATER_PAGE_SIZE=16" in lines
    assert len(lines) == len(all_settings())


def test_the_settings_page_is_up_to_date() -> None:
    """Regenerate with: headwater settings --markdown > docs/settings.md."""
    assert (ROOT / "docs" / "settings.md").read_text() == markdown()


def test_a_new_key_comes_with_the_line_that_lets_it_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("keys new acme") == 0
    told = capsys.readouterr()
    key, line = told.out.splitlines()
    (tmp_path / "keys").write_text(line)
    assert Keys(str(tmp_path / "keys")).account(key) == "acme"
    assert key not in told.err
    assert "HEADWATER_API_KEYS_FILE" in told.err
    assert exit_code("keys new acme") == 0
    assert key not in capsys.readouterr().out


def test_a_key_of_ones_own_is_hashed_from_stdin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("my-own-key-of-forty-characters-and-more!\n"))
    assert exit_code("keys hash acme") == 0
    (tmp_path / "keys").write_text(capsys.readouterr().out)
    keys = Keys(str(tmp_path / "keys"))
    assert keys.account("my-own-key-of-forty-characters-and-more!") == "acme"


@pytest.mark.parametrize(
    ("arguments", "stdin"),
    [("keys new 'two words'", ""), ("keys hash acme", "too-short\n"), ("keys hash acme", "")],
)
def test_no_line_is_printed_for_a_bad_account_or_a_weak_key(
    arguments: str, stdin: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    assert exit_code(arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert "too-short" not in told.err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--mode serverless", "HEADWATER_API_KEYS_FILE"),
        ("--api-keys-file /nonesuch/keys", "'/nonesuch/keys' can't be read: No such file or directory"),
        ("--cors-origins example.com", "HEADWATER_CORS_ORIGINS: 'example.com' is not allowed"),
        ("--cascade-costs byte=1", "HEADWATER_CASCADE_COSTS='byte=1' is not allowed"),
        (
            "--page-size 48",
            "HEADWATER_TILE=256 and HEADWATER_PAGE_SIZE=48 don't go together: a tile must be whole pages",
        ),
        (
            "--tile 100",
            "HEADWATER_TILE=100 and HEADWATER_PAGE_SIZE=16 don't go together: a tile must be whole pages",
        ),
        ("--kv-gb 4096", "HEADWATER_KV_GB=4096 is more than the memory"),
        ("--executor compiled --page-size 8", "HEADWATER_EXECUTOR=compiled can't be had: "),
        ("--executor flashinfer --dtype float32", "HEADWATER_DTYPE=float32 is not served"),
    ],
)
def test_what_is_wrong_at_the_door_is_told_before_anything_is_fetched(
    flags: str,
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADWATER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(machine, "memory_limit", lambda: 8_000_000_000)
    assert exit_code(f"serve {flags}") == 2
    told = capsys.readouterr().err
    assert named in told
    assert told.count("\n") == 1
    assert list(tmp_path.iterdir()) == []

    words = shlex.split(flags)
    for flag, value in zip(words[::2], words[1::2], strict=True):
        monkeypatch.setenv("HEADWATER_" + flag.removeprefix("--").replace("-", "_").upper(), value)
    assert exit_code("settings") == 2
    assert capsys.readouterr() == ("", told)


def test_a_missing_model_is_told_in_one_line() -> None:
    result = run("models", "path", "/nonesuch/model.gguf")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("headwater: ")
    assert result.stderr.count("\n") == 1
    assert "/nonesuch/model.gguf" in result.stderr


def test_the_default_model_can_be_located_and_listed() -> None:
    located = run("models", "path")
    assert located.returncode == 0, located.stderr
    assert Path(located.stdout.strip()).exists()
    assert "smollm2-135m-instruct" in run("models", "list").stdout


def test_a_taken_port_is_told_in_one_line_beside_a_warning_of_a_stray_variable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = run("serve", "--port", port, "--kv-gb", "0.1", HEADWATER_PROT="1")
    assert result.returncode == 1
    told = [line for line in result.stderr.splitlines() if line.startswith("headwater: ")]
    assert told[0] == "headwater: warning: nothing reads HEADWATER_PROT (did you mean HEADWATER_PORT?)"
    assert told[-1].startswith(f"headwater: port {port} on 127.0.0.1 is taken")
    assert "Traceback" not in result.stderr


def test_a_taken_port_is_told_before_anything_is_downloaded(tmp_path: Path) -> None:
    """O094: with an empty model folder too, the start ends at once."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = run("serve", "--port", port, HEADWATER_CACHE_DIR=str(tmp_path))
    assert result.returncode == 1
    assert "is taken" in result.stderr
    assert "fetching" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_while_the_kernel_compiles_ends_the_start_and_leaves_nothing(
    tmp_path: Path, smollm2: Path
) -> None:
    """A second one comes at once, as it does under impatient hands. The compiler would take a minute."""
    (stand_in := tmp_path / "c++").write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit\necho $$ > {tmp_path}/pid\nsleep 60\n'
    )
    stand_in.chmod(0o700)
    cache = tmp_path / "cache"
    env = {**os.environ, "HEADWATER_CACHE_DIR": str(cache), "CXX": str(stand_in)}
    command = [sys.executable, "-m", "server", "serve", "--port", "0", "--model", str(smollm2)]
    with subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True) as server:
        try:
            while not (tmp_path / "pid").exists() and server.poll() is None:
                time.sleep(0.02)
            server.send_signal(signal.SIGINT)
            server.send_signal(signal.SIGINT)
            _, told = server.communicate(timeout=30)
        finally:
            server.kill()
    assert server.returncode == 130, told
    assert "Traceback" not in told
    assert told.splitlines()[-1].endswith("stopped while loading")
    assert list((cache / "kernels").iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
