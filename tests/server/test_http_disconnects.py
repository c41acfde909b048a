"""Clients that leave, and clients that don't read: their work stops, nobody else's does."""

from __future__ import annotations

import asyncio
import random
import socket

import pytest

from server.config import ServerConfig
from tests.server.fakes import MODEL, FakeEngine, events_of, running, text_ids, until
from tests.server.sockets import connect, leave, request_bytes

LONG = {"model": MODEL, "prompt": "abc", "max_tokens": 100_000, "ignore_eos": True}


def endless(**options):
    return FakeEngine(lambda request: b"x" * 100_000, context=200_000, **options)


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["abc", ["a", "b", "c"]])
async def test_a_client_that_leaves_stops_its_work(how, stream, prompt):
    """O040: streaming or not, all choices are aborted within a step; the server serves the next."""
    async with running(endless(pace=0.002)) as client:
        _, writer = await connect(client, LONG | {"stream": stream, "prompt": prompt})
        choices = len(prompt) if isinstance(prompt, list) else 1
        await until(lambda: client.engine.steps > 3 and len(client.engine.live) == choices)
        leave(writer, how)
        await until(lambda: not client.engine.live)
        assert client.engine.finished == {"abort": choices}
        generated = sum(client.engine.generated.values())
        assert (await client.complete(max_tokens=3))["usage"]["completion_tokens"] == 3
        assert sum(client.engine.generated.values()) == generated + 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token_is_noticed(stream):
    """O039, O041: no byte was written yet, and it is noticed all the same."""
    engine = endless()
    engine.gate.clear()
    async with running(engine) as client:
        _, writer = await connect(client, LONG | {"stream": stream})
        await until(lambda: len(engine.live) == 1)
        leave(writer, "close")
        await until(lambda: not engine.live)
        assert (engine.finished, engine.steps) == ({"abort": 1}, 0)


async def test_a_queued_clients_leaving_touches_no_other():
    """O042: A streams, B waits behind it and leaves; A's reply is whole and unchanged."""
    engine = FakeEngine(lambda r: text_ids(bytes(r.prompt).decode() * 60), pace=0.001, max_running=1)
    async with running(engine) as client:
        for max_running in (1, 2):
            engine.max_running = max_running
            first = asyncio.create_task(client.stream("/v1/completions", {"model": MODEL, "prompt": "AB"}))
            await until(lambda: len(engine.live) == 1)
            _, writer = await connect(client, {"model": MODEL, "prompt": "CD", "stream": True})
            await until(lambda: len(engine.live) == 2)
            leave(writer, "reset")
            await until(lambda: len(engine.live) == 1)
            events, _ = await first
            assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "AB" * 60
            assert events[-1] == "[DONE]"


async def test_fifty_clients_leave_at_random_points():
    """O038: whenever they leave, nothing of them stays, and the rest is answered in full."""
    chance = random.Random(7)
    engine = FakeEngine("x" * 100, pace=0.0005, max_running=8)
    async with running(engine) as client:

        async def leaver():
            body = {"model": MODEL, "prompt": "abc", "stream": chance.random() < 0.5}
            _, writer = await connect(client, body)
            await asyncio.sleep(chance.random() * 0.2)
            leave(writer, chance.choice(["close", "reset"]))

        *_, reply = await asyncio.gather(*(leaver() for _ in range(50)), client.complete("p"))
        assert reply["choices"][0]["text"] == "x" * 100
        await until(lambda: not engine.live)
        assert (await client.complete("q"))["choices"][0]["text"] == "x" * 100


async def test_a_client_that_never_reads_is_dropped_and_the_others_run_on():
    """O081: what is held for it is bounded, its pages come back, other streams don't notice."""
    engine = endless(per_delta=500)
    config = ServerConfig(write_timeout=0.3, write_buffer_kb=1)
    async with running(engine, config) as client:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (client.host, client.port))
        # Without reading: open_connection would read into its own buffer.
        await asyncio.get_running_loop().sock_sendall(
            sock,
            request_bytes(LONG | {"stream": True, "return_token_ids": True, "prompt": ["a", "b", "c"] * 20}),
        )
        await until(lambda: len(engine.live) == 60)
        events, _ = await client.stream("/v1/completions", LONG | {"prompt": "q", "max_tokens": 2000})
        assert sum(len(event["choices"][0]["text"]) for event in events[:-1]) == 2000
        await until(lambda: len(engine.live) == 0, 20)
        read = b""
        while data := await asyncio.get_running_loop().sock_recv(sock, 1 << 20):
            read += data
        sock.close()
        # Cut off, not ended: neither the dialect's end mark nor the transfer's.
        assert b"[DONE]" not in read
        assert not read.endswith(b"0\r\n\r\n")
        assert (await client.complete("p", max_tokens=2))["usage"]["completion_tokens"] == 2


async def test_a_client_that_reads_slowly_gets_everything():
    """O081: as long as it reads at all, the stream waits for it and loses nothing."""
    engine = FakeEngine(lambda _: text_ids("abcdefghij" * 400), context=10_000, per_delta=7)
    async with running(engine, ServerConfig(write_buffer_kb=1, default_max_tokens=5000)) as client:
        reader, writer = await connect(client, {"model": MODEL, "prompt": "a", "stream": True}, limit=4096)
        await reader.readuntil(b"\r\n\r\n")
        found = b""
        while not found.endswith(b"0\r\n\r\n"):
            found += await reader.read(2000)
            await asyncio.sleep(0)
        writer.close()
        text = "".join(chunk for chunk in _dechunk(found))
        events = events_of(text)
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "abcdefghij" * 400


def _dechunk(data):
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        yield data[:length].decode()
        data = data[length + 2 :]
