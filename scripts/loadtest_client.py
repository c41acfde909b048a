"""One endpoint of a load test: finds its model, sends it conversations, and times what comes back."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from loadtest_report import Record
from loadtest_workloads import Session

try:
    import aiohttp
except ImportError:
    sys.exit("The load test needs aiohttp: run it with the Python that has it (.venv/bin/python here).")


class CannotBegin(Exception):
    """The test can't start; the message says why and what to do."""


@contextlib.asynccontextmanager
async def connected(options: argparse.Namespace) -> AsyncIterator[aiohttp.ClientSession]:
    """As many connections as there are requests, with the options' key and timeout."""
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    timeout = aiohttp.ClientTimeout(total=options.timeout)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as http:
        yield http


async def find_model(http: aiohttp.ClientSession, options: argparse.Namespace) -> str:
    """Ask the server for its models: which also shows that it is there."""
    try:
        async with http.get(f"{options.url}/models", timeout=aiohttp.ClientTimeout(total=10)) as response:
            status, text = response.status, await response.text()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        reason = str(error) or "no answer in 10 s"
        raise CannotBegin(f"No server answers at {options.url}: {reason}. Start it, or give --url.") from None
    if status in (401, 403):
        raise CannotBegin(f"{options.url} refuses access ({status}): {_message(text)}. Give --api-key.")
    if options.model:
        return str(options.model)
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return str(json.loads(text)["data"][0]["id"])
    raise CannotBegin(f"{options.url}/models lists no model (status {status}). Give --model.")


class Refused(Exception):
    """A request failed in a way that has a name."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(detail)
        self.kind = kind


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Split server-sent events into the data of each; comments and other fields are skipped."""
    pending, data = b"", []
    async for chunk in chunks:
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" ").decode("utf-8", "replace"))
            elif not line and data:
                yield "\n".join(data)
                data = []
    if data:
        yield "\n".join(data)


class Client:
    """Sends conversations to one endpoint and times what comes back."""

    def __init__(self, http: aiohttp.ClientSession, model: str, options: argparse.Namespace) -> None:
        self._http = http
        self._options = options
        self._path = f"{options.url}/{'chat/completions' if options.chat else 'completions'}"
        self._body = {
            "model": model,
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.ignore_eos:
            self._body["ignore_eos"] = True

    async def ask(self, session: Session, replies: Sequence[str]) -> Record:
        """Send the turn after `replies`, and read its stream to the end."""
        body = {**self._body, **self._prompt(session, replies)}
        record = Record(session.kind, time.perf_counter())
        try:
            async with self._http.post(self._path, json=body) as response:
                if response.status != 200:
                    raise Refused(f"http {response.status}", _message(await response.text(errors="replace")))
                await self._read(response, record)
        except Refused as refused:
            record.error, record.detail = refused.kind, str(refused)
        except TimeoutError:
            record.error, record.detail = "timeout", f"not done after {self._options.timeout:g} s"
        except aiohttp.ClientConnectorError as error:
            record.error, record.detail = "connect", str(error)
        except aiohttp.ClientError as error:
            record.error, record.detail = "disconnected", str(error) or type(error).__name__
        record.ended = time.perf_counter()
        return record

    def _prompt(self, session: Session, replies: Sequence[str]) -> dict[str, Any]:
        messages = [{"role": "system", "content": session.system}] if session.system else []
        for turn, text in enumerate(session.turns[: len(replies) + 1]):
            messages.append({"role": "user", "content": text})
            if turn < len(replies):
                messages.append({"role": "assistant", "content": replies[turn]})
        if self._options.chat:
            return {"messages": messages}
        return {"prompt": "\n".join(f"{m['content']}" for m in messages) + "\n"}

    async def _read(self, response: aiohttp.ClientResponse, record: Record) -> None:
        finished = False
        async for data in events(response.content.iter_any()):
            if data.strip() == "[DONE]":
                finished = True
                continue
            try:
                finished |= _take(json.loads(data), record)
            except (ValueError, TypeError, AttributeError):
                raise Refused("bad event", data[:100]) from None
        if not finished:
            raise Refused("cut short", "the stream ended without a finish reason")


def _take(event: dict[str, Any], record: Record) -> bool:
    """Note what one event brings, and say whether it finishes the reply."""
    if event.get("error"):
        raise Refused("error event", _message(json.dumps(event)))
    _note_usage(event.get("usage"), record)
    finished = False
    for choice in event.get("choices") or ():
        finished |= choice.get("finish_reason") is not None
        if text := _text_of(choice):
            record.arrivals.append(time.perf_counter())
            record.text += text
    return finished


def _text_of(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    parts = (choice.get("text"), delta.get("reasoning_content"), delta.get("content"))
    return "".join(part for part in parts if part)


def _note_usage(usage: Any, record: Record) -> None:
    """Take usage from whichever event brings it: the finish chunk, or one without choices after it."""
    if isinstance(usage, dict):
        record.prompt_tokens = usage.get("prompt_tokens")
        record.completion_tokens = usage.get("completion_tokens")
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def _message(text: str) -> str:
    """Find the human part of an error body."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        error = json.loads(text)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    return " ".join(text.split())[:200]
