"""An HTTP server with one thread per connection, which bounds their number, how long each may take to ask, and the
bytes of all bodies together. Connections that ask for nothing keep away nobody that asks."""

from __future__ import annotations

import contextlib
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ASKED_S = 60.0
"""Seconds from the connection to the last byte of its request."""
_MOST = 2048
_MOST_BODIES = 256 << 20
_END_S = 1.0
"""Longest wait for the thread of a connection that was closed."""


class BoundedServer(ThreadingHTTPServer):
    """Its handlers call `asked` once a request has arrived, and hold `room` for its body."""

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        """Raises OSError if the address cannot be bound."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = _MOST if soft == resource.RLIM_INFINITY else min(_MOST, soft // 2)
        """Connections; the other half of the files is for the runs."""
        self._open: dict[socket.socket, None] = {}
        self._asking: dict[socket.socket, float] = {}
        """Those whose request has not arrived, oldest first, and since when."""
        self._changed = threading.Condition()
        self._bodies = 0
        super().__init__(address, handler)

    def asked(self, connection: socket.socket) -> None:
        with self._changed:
            self._asking.pop(connection, None)

    @contextlib.contextmanager
    def room(self, length: int) -> Iterator[bool]:
        """Whether there is room for so many bytes more; if so, they count until the context ends."""
        with self._changed:
            if given := self._bodies + length <= _MOST_BODIES:
                self._bodies += length
        try:
            yield given
        finally:
            if given:
                with self._changed:
                    self._bodies -= length

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
