"""An HTTP server with one thread per connection, which bounds their number, how long each may take to ask, and the
bytes of all bodies together. Connections that ask for nothing, or never end what they ask, keep away nobody."""

from __future__ import annotations

import contextlib
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from typing import Any

ASKED_S = 60.0
"""Seconds from the connection to the last byte of its request."""
MOST_BODIES = 256 << 20
_MOST = 2048
_PART = 64 << 10
"""Bytes of a body that are read at once."""
_END_S = 1.0
"""Longest wait for the thread of a connection that was closed."""


class BoundedServer(ThreadingHTTPServer):
    """Its handlers take a body from `body`, or call `asked` once a request without one has arrived."""

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        """Raises OSError if the address cannot be bound."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = _MOST if soft == resource.RLIM_INFINITY else min(_MOST, soft // 2)
        """Connections; the other half of the files is for what the answers need."""
        self._open: dict[socket.socket, None] = {}
        self._asking: dict[socket.socket, float] = {}
        """Those whose request has not arrived, oldest first, and since when."""
        self._bodies: dict[socket.socket, int] = {}
        """Bytes that are held, or about to be read, of each."""
        self._changed = threading.Condition()
        super().__init__(address, handler)

    def asked(self, connection: socket.socket) -> None:
        with self._changed:
            self._asking.pop(connection, None)

    @contextlib.contextmanager
    def body(self, connection: socket.socket, file: BufferedIOBase, length: int) -> Iterator[bytearray | None]:
        """The request's body, whose bytes count from their arrival until the context ends; None: there is no room.

        For want of room the connection with the longest body that has not ended is closed, so that its bytes are freed
        in a moment. What a peer only announces takes none, and a body that was cut off is shorter.
        """
        try:
            yield self._read(connection, file, length)
        finally:
            with self._changed:
                self._bodies.pop(connection, None)

    def _read(self, connection: socket.socket, file: BufferedIOBase, length: int) -> bytearray | None:
        body = bytearray()
        while missing := length - len(body):
            if not self._given(connection, part := min(missing, _PART)):
                return None
            if not (read := file.read(part)):
                break
            body += read
        self.asked(connection)
        return body

    def _given(self, connection: socket.socket, size: int) -> bool:
        """Whether there is room for so many bytes more of this connection's body. One that was closed gets none."""
        with self._changed:
            while connection in self._asking and sum(self._bodies.values()) + size > MOST_BODIES:
                longest = max(self._asking, key=lambda each: self._bodies.get(each, 0))
                if longest is connection or longest not in self._bodies:
                    return False
                del self._asking[longest], self._bodies[longest]
                _end(longest)
            if given := connection in self._asking:
                self._bodies[connection] = self._bodies.get(connection, 0) + size
        return given

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            if len(self._open) >= self._most and self._asking:
                _end(next(iter(self._asking)))
                self._changed.wait_for(lambda: len(self._open) < self._most, _END_S)
            # If it is full now, all of them wait for their answer.
            if not (full := len(self._open) >= self._most):
                self._open[request], self._asking[request] = None, time.monotonic()
        if full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self._changed:
            self._open.pop(request, None)
            self._asking.pop(request, None)
            self._changed.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of connections that broke or were closed: a stranger would fill the log."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def service_actions(self) -> None:
        """Closes what is overdue; called by `serve_forever` after each connection, and each half second."""
        overdue = time.monotonic() - ASKED_S
        with self._changed:
            for connection in [each for each, since in self._asking.items() if since < overdue]:
                del self._asking[connection]
                _end(connection)


def _end(connection: socket.socket) -> None:
    """Wakes the thread that reads from the connection, which closes it."""
    with contextlib.suppress(OSError):  # it is closed already
        connection.shutdown(socket.SHUT_RDWR)
