"""The endpoint's connections: how many it keeps, and how long a peer may take to ask.

Of too many, the first one that has asked nothing yet is closed, or else the first one that is idle; an agent that was
about to use it connects again. One whose answer is under way is never closed for others.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time

from uvicorn.protocols.http.h11_impl import H11Protocol

from asyncrl.actors.endpoint.delivery import Connections

log = logging.getLogger(__name__)

HEAD_S = 15.0
"""Seconds until a request's head has arrived, from the connection or its first byte on ..."""
BODY_S = 60.0
"""... and from there until its body has."""
MAX_HEAD_BYTES = 64 << 10
ACCEPTED_AT_ONCE = 64
"""Connections accepted before those over the limit are closed."""
WAITING = 1024
"""Connections that the system keeps until they are taken."""
_MOST = 4096
_REPORT_S = 60.0


class OpenConnections:
    """The open connections, oldest first."""

    def __init__(self, deliveries: Connections) -> None:
        self.deliveries = deliveries
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._files = soft
        self._most = _MOST if soft == resource.RLIM_INFINITY else min(_MOST, soft // 2)
        """The other half is for what else the actor opens."""
        self._open: dict[Limited, None] = {}
        self._closed, self._report_at = 0, 0.0

    def opened(self, connection: Limited) -> None:
        self._open[connection] = None
        if len(self._open) > self._most:
            self._close_one(connection)

    def closed(self, connection: Limited) -> None:
        self._open.pop(connection, None)

    def _close_one(self, newest: Limited) -> None:
        chosen = (
            next((each for each in self._open if each.cycle is None and each is not newest), None)
            or next((each for each in self._open if each.idle), None)
            or newest
        )
        del self._open[chosen]
        chosen.transport.abort()
        self._closed += 1
        if (now := time.monotonic()) >= self._report_at:
            self._report_at = now + _REPORT_S
            log.warning(
                "the endpoint has closed %d connections on which nothing was asked, since it keeps at most %d: half of "
                "the limit of open files, which is %d (ulimit -n). Agents leave them open, or a stranger connects",
                self._closed, self._most, self._files,
            )  # fmt: skip


class Limited(H11Protocol):
    """uvicorn's protocol, with a deadline for the head of a request. It reports when it is opened and closed."""

    kept: OpenConnections
    """Set in the class that `limited` makes."""
    _head: asyncio.TimerHandle | None = None

    @property
    def answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def idle(self) -> bool:
        """Whether the last answer is with the system, if not with the agent."""
        return not self.answering and not self.transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()
        if self.client is not None:
            self.kept.deliveries.opened(self.client, transport)
        self.kept.opened(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.answering:
            self._cancel()
        elif self._head is None and not self.transport.is_closing():
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        self.kept.closed(self)
        super().connection_lost(exc)
        if self.client is not None:
            self.kept.deliveries.closed(self.client, exc)

    def _await_head(self) -> None:
        self._head = self.loop.call_later(HEAD_S, self.transport.abort)

    def _cancel(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None


def limited(connections: Connections) -> type[asyncio.Protocol]:
    """The protocol of one endpoint."""

    class OfEndpoint(Limited):
        kept = OpenConnections(connections)

    return OfEndpoint
