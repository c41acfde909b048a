"""Clients below HTTP libraries: they send a request by hand and leave as rudely as a test wants."""

from __future__ import annotations

import asyncio
import json
import socket
import struct


def request_bytes(body, path="/v1/completions"):
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def connect(client, body, **options):
    reader, writer = await asyncio.open_connection(client.host, client.port, **options)
    writer.write(request_bytes(body))
    await writer.drain()
    return reader, writer


def leave(writer, how):
    """End a connection politely, or the way a killed process ends it."""
    if how == "reset":
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()
