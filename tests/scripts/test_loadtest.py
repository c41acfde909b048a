"""The load test, run as a command against a small server that speaks the dialect and keeps a diary."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

SCRIPT = Path(__file__).parents[2] / "scripts" / "loadtest.py"
SMALL = ("--prompt-tokens", "8", "--prefix-tokens", "16", "--max-tokens", "4", "--seed", "7")


@dataclass
class Diary:
    """What the server does, and what it saw. Half of each prompt counts as cached."""

    usage_at: str = "end"  # "end": an event without choices; "finish": the finish event; "none"
    fail: Callable[[web.Request, int], Awaitable[web.StreamResponse | None]] | None = None
    pause: float = 0.0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        self.paths.append(request.path)
        self.headers.append(dict(request.headers))
        if self.fail and (failure := await self.fail(request, number)) is not None:
            return failure
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await self._stream(request, body, f"reply-{number}")
        finally:
            self.at_once -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any], text: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        chat = "messages" in body
        words = json.dumps(body.get("messages") or body["prompt"]).split()
        usage = {
            "prompt_tokens": len(words),
            "completion_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": len(words) // 2},
        }
        await response.write(b": a comment\n\n")
        for piece in (text, " one", " two", " three"):
            choice = {"delta": {"content": piece}} if chat else {"text": piece}
            await self._event(response, {"choices": [{"index": 0, "finish_reason": None, **choice}]})
            await asyncio.sleep(self.pause)
        last: dict[str, Any] = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
        if self.usage_at == "finish":
            last["usage"] = usage
        await self._event(response, last)
        if self.usage_at == "end":
            await self._event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    @staticmethod
    async def _event(response: web.StreamResponse, event: dict[str, Any]) -> None:
        data = f"data: {json.dumps(event)}\r\n\r\n".encode()
        await response.write(data[:9])  # an event may come in pieces
        await response.write(data[9:])


@pytest.fixture
async def served() -> AsyncIterator[tuple[Diary, str]]:
    diary = Diary()

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "small"}, {"id": "other"}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", diary.complete)
    app.router.add_post("/v1/completions", diary.complete)
    async with TestServer(app) as server:
        yield diary, f"http://127.0.0.1:{server.port}/v1"


async def start(*arguments: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, str(SCRIPT), *arguments, stdout=pipe, stderr=pipe
    )


async def load(*arguments: str) -> tuple[int | None, str, str]:
    process = await start(*arguments)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def report_of(*arguments: str) -> dict[str, Any]:
    code, out, err = await load(*arguments, "--json", "-")
    assert code == 0, err
    return json.loads(out)


def own(body: dict[str, Any]) -> str:
    return body["messages"][-1]["content"]


@pytest.mark.parametrize("usage_at", ["end", "finish"])
@pytest.mark.parametrize("style", ["--chat", "--completions"])
async def test_usage_is_read_wherever_the_server_puts_it(served, usage_at, style):
    diary, url = served
    diary.usage_at = usage_at
    report = await report_of("shared-prefix", "--url", url, "--requests", "5", style, *SMALL)
    assert report["requests"] == report["succeeded"] == 5
    assert report["output_tokens"] == 20
    prompts = [json.dumps(b.get("messages") or b["prompt"]).split() for b in diary.bodies]
    assert report["prompt_tokens"] == sum(map(len, prompts))
    assert report["cached_tokens"] == sum(len(p) // 2 for p in prompts)
    assert report["cached_share"] == report["cached_tokens"] / report["prompt_tokens"]
    assert set(diary.paths) == {"/v1/chat/completions" if style == "--chat" else "/v1/completions"}


async def test_without_usage_tokens_are_counted_and_the_cached_share_is_unknown(served):
    diary, url = served
    diary.usage_at = "none"
    code, out, _ = await load("no-sharing", "--url", url, "--requests", "3", *SMALL)
    assert code == 0
    assert "12 tokens" in out
    assert "not reported by the server" in out


async def test_the_json_report_has_its_documented_fields(served):
    _, url = served
    report = await report_of("mixed", "--url", url, "--requests", "20", *SMALL)
    numbers = {
        "seconds": float,
        "requests": int,
        "succeeded": int,
        "failed": int,
        "errors": dict,
        "requests_per_second": float,
        "output_tokens": int,
        "output_tokens_per_second": float,
        "prompt_tokens": int,
        "cached_tokens": int,
        "cached_share": float,
    }
    spreads = ("cached_share_per_request", "ttft_ms", "inter_token_ms", "end_to_end_ms")
    assert set(report["parts"]) == {"shared-prefix", "multi-turn", "no-sharing"}
    for part in (report, *report["parts"].values()):
        assert {key: type(part[key]) for key in numbers} == numbers
        for key in spreads:
            spread = part[key]
            assert set(spread) == {"p50", "p95", "p99", "mean", "max"}
            assert 0 <= spread["p50"] <= spread["p95"] <= spread["p99"] <= spread["max"]
    about = {k: report[k] for k in ("format", "workload", "url", "model", "seed", "interrupted")}
    assert about == {
        "format": 1,
        "workload": "mixed",
        "url": url,
        "model": "small",
        "seed": 7,
        "interrupted": False,
    }
    assert report["options"]["max_tokens"] == 4
    assert sum(part["requests"] for part in report["parts"].values()) == report["requests"] == 20


async def test_requests_ask_for_what_the_options_say(served):
    diary, url = served
    extra = ("--model", "other", "--api-key", "secret", "--ignore-eos", "--temperature", "0.5")
    report = await report_of("no-sharing", "--url", url, "--requests", "1", *extra, *SMALL)
    (body,) = diary.bodies
    assert body.pop("messages")
    assert body == {
        "model": "other",
        "max_tokens": 4,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert diary.headers[0]["Authorization"] == "Bearer secret"
    assert "secret" not in json.dumps(report)


async def test_shared_prefix_groups_share_a_system_prompt_and_nothing_else(served):
    diary, url = served
    await report_of("shared-prefix", "--url", url, "--requests", "12", "--groups", "3", *SMALL)
    systems = [body["messages"][0]["content"] for body in diary.bodies]
    assert sorted(systems.count(s) for s in set(systems)) == [4, 4, 4]
    assert all(len(s.split()) == 16 for s in systems)
    assert len({own(body) for body in diary.bodies}) == 12
    assert all(len(own(body).split()) == 8 for body in diary.bodies)


async def test_no_sharing_shares_not_even_the_first_word(served):
    diary, url = served
    await report_of("no-sharing", "--url", url, "--requests", "12", *SMALL)
    assert all(len(body["messages"]) == 1 for body in diary.bodies)
    assert len({tuple(own(body).split()[:2]) for body in diary.bodies}) == 12


async def test_multi_turn_sends_the_whole_history_with_the_replies(served):
    diary, url = served
    options = ("--requests", "6", "--turns", "3", "--concurrency", "1")
    await report_of("multi-turn", "--url", url, *options, *SMALL)
    assert [len(body["messages"]) for body in diary.bodies] == [2, 4, 6, 2, 4, 6]
    second, third = diary.bodies[1]["messages"], diary.bodies[2]["messages"]
    assert second[:2] == diary.bodies[0]["messages"]
    assert second[2] == {"role": "assistant", "content": "reply-0 one two three"}
    assert third[: len(second)] == second


async def test_a_conversation_is_cut_where_the_requests_end(served):
    diary, url = served
    report = await report_of("multi-turn", "--url", url, "--requests", "4", "--turns", "3", *SMALL)
    assert report["requests"] == len(diary.bodies) == 4


async def test_the_same_seed_sends_the_same_prompts(served):
    diary, url = served
    for seed in ("1", "1", "2"):
        options = (*SMALL[:-1], seed, "--concurrency", "1")
        await report_of("mixed", "--url", url, "--requests", "6", *options)
    first, again, other = (diary.bodies[i : i + 6] for i in (0, 6, 12))
    assert [own(b) for b in first] == [own(b) for b in again]
    assert not {own(b) for b in first} & {own(b) for b in other}


async def test_concurrency_is_kept_and_not_exceeded(served):
    diary, url = served
    three = asyncio.Barrier(3)

    async def meet(request: web.Request, number: int) -> None:
        await three.wait()

    diary.fail = meet
    diary.pause = 0.02
    await report_of("no-sharing", "--url", url, "--requests", "12", "--concurrency", "3", *SMALL)
    assert diary.most_at_once == 3


async def test_a_rate_starts_requests_without_waiting_for_replies(served):
    diary, url = served
    everyone = asyncio.Barrier(12)

    async def meet(request: web.Request, number: int) -> None:
        await everyone.wait()

    diary.fail = meet
    report = await report_of("shared-prefix", "--url", url, "--requests", "12", "--rate", "500", *SMALL)
    assert report["succeeded"] == 12


async def test_a_terminal_sees_progress(served):
    _, url = served
    ours, theirs = os.openpty()
    pipe = asyncio.subprocess.PIPE
    arguments = (str(SCRIPT), "no-sharing", "--url", url, "--requests", "3", *SMALL)
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=pipe, stderr=theirs)
    out, _ = await process.communicate()
    os.close(theirs)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert "running" in shown
    assert "3 succeeded" in out.decode()


async def test_a_duration_starts_nothing_new_after_it(served):
    diary, url = served
    diary.pause = 0.02
    report = await report_of("multi-turn", "--url", url, "--duration", "0.5", *SMALL)
    assert report["requests"] == report["succeeded"] == len(diary.bodies) > 0


async def test_warm_up_requests_are_sent_but_not_counted(served):
    diary, url = served
    report = await report_of("shared-prefix", "--url", url, "--requests", "5", "--warmup", "4", *SMALL)
    assert len(diary.bodies) == 9
    assert report["requests"] == 5
    assert len({own(body) for body in diary.bodies}) == 9


async def test_errors_are_counted_by_kind_and_the_rest_goes_on(served):
    """O079: a stream that ends early is an error, never a finished reply."""
    diary, url = served

    async def fail(request: web.Request, number: int) -> web.StreamResponse | None:
        if number == 0:
            error = {"message": "the queue is full", "type": "x", "param": None, "code": None}
            return web.json_response({"error": error}, status=503)
        if number > 4:
            return None
        response = web.StreamResponse()
        await response.prepare(request)
        if number == 1:
            await response.write(b'data: {"choices": [{"delta": {"content": "half a"}}]}\n\n')
        elif number == 2:
            await response.write(b'event: error\ndata: {"error": {"message": "step failed"}}\n\n')
        elif number == 3:
            await response.write(b"data: this is no JSON\n\n")
        else:
            assert request.transport is not None
            request.transport.close()
        return response

    diary.fail = fail
    report = await report_of("no-sharing", "--url", url, "--requests", "8", "--concurrency", "1", *SMALL)
    kinds = ("http 503", "cut short", "error event", "bad event", "disconnected")
    assert {kind: entry["count"] for kind, entry in report["errors"].items()} == dict.fromkeys(kinds, 1)
    assert report["errors"]["http 503"]["example"] == "the queue is full"
    assert report["errors"]["error event"]["example"] == "step failed"
    assert (report["succeeded"], report["failed"]) == (3, 5)


async def test_a_stalled_server_ends_in_timeouts_and_a_failing_exit_code(served):
    diary, url = served
    gone = asyncio.Event()

    async def stall(request: web.Request, number: int) -> web.StreamResponse | None:
        await gone.wait()
        return None

    diary.fail = stall
    code, out, _ = await load(
        "no-sharing", "--url", url, "--requests", "2", "--timeout", "0.3", *SMALL, "--json", "-"
    )
    gone.set()
    report = json.loads(out)
    assert code == 1
    assert report["errors"]["timeout"]["count"] == report["failed"] == 2
    assert report["ttft_ms"]["p50"] is None


async def test_ctrl_c_reports_what_there_is(served):
    diary, url = served
    reached, never = asyncio.Event(), asyncio.Event()

    async def stall_later(request: web.Request, number: int) -> web.StreamResponse | None:
        if number >= 3:
            reached.set()
            await never.wait()
        return None

    diary.fail = stall_later
    process = await start("no-sharing", "--url", url, "--concurrency", "1", *SMALL)
    await reached.wait()
    process.send_signal(signal.SIGINT)
    out, err = await process.communicate()
    never.set()
    assert process.returncode == 130
    assert "interrupted" in out.decode()
    assert "3 succeeded, 0 failed" in out.decode()
    assert "Traceback" not in err.decode()


async def test_no_server_is_said_in_one_line(unused_tcp_port):
    code, out, err = await load("mixed", "--url", f"http://127.0.0.1:{unused_tcp_port}")
    assert (code, out) == (2, "")
    assert err.startswith(f"No server answers at http://127.0.0.1:{unused_tcp_port}/v1")
    assert err.count("\n") == 1


async def test_table_json_file_and_picture_come_from_one_run(served, tmp_path):
    _, url = served
    files = ("--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png"))
    code, out, err = await load("mixed", "--url", url, "--requests", "9", *SMALL, *files)
    assert code == 0, err
    assert err == ""  # no progress bar where no terminal is
    for label in ("p50", "p95", "p99", "TTFT", "inter-token", "end to end", "cached share"):
        assert label in out
    assert json.loads((tmp_path / "out.json").read_text())["succeeded"] == 9
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


async def test_results_that_cannot_be_written_stop_the_test_before_it_begins(served, tmp_path):
    diary, url = served
    code, _, err = await load("mixed", "--url", url, "--json", str(tmp_path / "none" / "out.json"))
    assert code == 2
    assert "no folder" in err
    assert diary.bodies == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("unknown",),
        ("mixed", "--concurrency", "0"),
        ("mixed", "--rate", "0"),
        ("mixed", "--rate", "2", "--concurrency", "2"),
        ("mixed", "--chat", "--completions"),
        ("mixed", "--requests", "many"),
    ],
)
async def test_bad_options_are_refused(arguments):
    code, _, err = await load(*arguments)
    assert code == 2
    assert "usage:" in err
