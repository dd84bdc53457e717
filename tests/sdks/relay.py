"""A relay between an agent's SDK and the endpoint: it records the replies that it passes on whole, and breaks some.

It works on connections, so that a break here is a break there: whatever ends one side resets the other.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

Fault = Literal["calm", "reset", "stall"]
_LINGER_0 = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class Exchange:
    """A request and the reply that the agent received."""

    path: str
    request: Any
    reply: bytes


@dataclass
class Relay:
    """Breaks reply number `at` (from 0) as `fault` says: `reset`, not a byte of it arrives; `stall`, the client waits
    until it gives up."""

    target: str
    fault: Fault
    at: int
    received: list[Exchange] = field(default_factory=list)
    broken: int = 0
    stalled: asyncio.Event = field(default_factory=asyncio.Event)
    _replies: int = 0
    _server: asyncio.Server | None = None

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    @property
    def base_url(self) -> str:
        assert self._server is not None
        url = urlsplit(self.target)
        return url._replace(netloc=f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}").geturl()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        url = urlsplit(self.target)
        up_reader, up_writer = await asyncio.open_connection(url.hostname, url.port, limit=1 << 24)
        try:
            while (asked := await _message(reader)) is not None:
                up_writer.write(asked.raw)
                if not await self._passed(asked, reader, writer, up_reader):
                    _reset(up_writer)
                    _reset(writer)
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            _reset(up_writer)
        finally:
            writer.close()
            up_writer.close()

    async def _passed(
        self,
        asked: _Message,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        up_reader: asyncio.StreamReader,
    ) -> bool:
        """Whether the reply to `asked` was passed on."""
        replying = asyncio.ensure_future(_message(up_reader))
        leaving = asyncio.ensure_future(_left(reader))
        try:
            await asyncio.wait([replying, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not replying.done() or (reply := replying.result()) is None:
                return False
            number, self._replies = self._replies, self._replies + 1
            if self.fault != "calm" and number == self.at:
                self.broken += 1
                if self.fault == "stall":
                    self.stalled.set()
                    await leaving
                return False
        finally:
            replying.cancel()
            leaving.cancel()
        writer.write(reply.raw)
        await writer.drain()
        if reply.head.startswith("HTTP/1.1 200") and asked.head.startswith("POST"):
            path = asked.head.split(" ")[1]
            self.received.append(Exchange(path, json.loads(asked.body), reply.body))
        return True


@dataclass(frozen=True)
class _Message:
    head: str
    body: bytes
    raw: bytes


async def _message(reader: asyncio.StreamReader) -> _Message | None:
    """One message of HTTP/1.1 with a content length; None at the end of the connection."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as ended:
        if ended.partial:
            raise
        return None
    head = raw.decode("latin-1")
    lengths = [line.partition(":")[2] for line in head.split("\r\n") if line.lower().startswith("content-length:")]
    assert lengths or not head.startswith("POST"), f"no content-length: {head}"
    body = await reader.readexactly(int(lengths[0])) if lengths else b""
    return _Message(head, body, raw + body)


async def _left(reader: asyncio.StreamReader) -> None:
    """Returns when the client closes the connection while it waits for a reply."""
    while not reader.at_eof() and reader.exception() is None:  # noqa: ASYNC110 - reading would take the next request
        await asyncio.sleep(0.01)


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)
    writer.transport.abort()
