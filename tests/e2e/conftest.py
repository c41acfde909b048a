"""The whole server, as a process of its own, on the default model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import anthropic
import openai
import pytest
from fireworks import Fireworks

from engine.text import TextCodec

START_LIMIT = 120.0


@pytest.fixture(scope="session")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its base URL. At the end it must drain and exit with 0, and its last words hold no traceback."""
    log = tmp_path_factory.mktemp("server") / "log.txt"
    command = [sys.executable, "-m", "server", "serve", "--port", "0", "--kv-gb", "0.5"]
    env = {
        k: v for k, v in os.environ.items() if not k.startswith("HEADWATER_") or k == "HEADWATER_CACHE_DIR"
    }
    with log.open("wb") as out, subprocess.Popen(command, stderr=out, stdout=out, env=env) as process:
        try:
            yield _wait(process, log)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, log.read_text()
        finally:
            process.kill()
    assert "Traceback" not in log.read_text()


@pytest.fixture(scope="session")
def codec(smollm2: Path) -> TextCodec:
    """The model's own text codec, to know which tokens a text has."""
    return TextCodec.load(smollm2)


@pytest.fixture(scope="session")
def openai_client(server: str) -> Iterator[openai.OpenAI]:
    """OpenAI's own client. It does not retry, so that no failure goes unseen."""
    with openai.OpenAI(base_url=server + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def fireworks_client(server: str) -> Iterator[Fireworks]:
    """Fireworks' own client, under the path that it knows."""
    with Fireworks(base_url=server + "/inference", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def anthropic_client(server: str) -> Iterator[anthropic.Anthropic]:
    """Anthropic's own client."""
    with anthropic.Anthropic(base_url=server, api_key="none", max_retries=0) as client:
        yield client


def _wait(process: subprocess.Popen[bytes], log: Path) -> str:
    """Poll until the server is ready; returns its address."""
    end = time.monotonic() + START_LIMIT
    while time.monotonic() < end and process.poll() is None:
        found = re.search(r"listening on (http://\S+)", log.read_text())
        if found:
            try:
                with urllib.request.urlopen(found[1] + "/ready", timeout=5):
                    return found[1]
            except urllib.error.HTTPError as error:
                error.close()
            except OSError:
                pass
        time.sleep(0.1)
    raise RuntimeError(f"the server did not start:\n{log.read_text()}")
