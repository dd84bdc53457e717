"""Decides whether the agent received a reply: one that it did not receive had no effect on it, and carries no loss.

By the best evidence there is, a reply was received if
    a later request contains it, or
    asyncrl's own client read the whole body and returned it to the agent, or,
    with any other client, every byte was passed to the socket, and the connection was not reset or closed early before
    the end of the episode; a further request over the same connection makes that certain.
"""

from __future__ import annotations

from asyncio import Transport
from collections.abc import Callable
from dataclasses import dataclass, field

OWN_CLIENT = "x-asyncrl-client"
"""Header of requests of the client that asyncrl gives to the agent."""
ANSWER_ID = "x-asyncrl-answer"
"""Header of a reply: the id of its transmission."""

WasRead = Callable[[str], bool]
"""Whether asyncrl's own client read the transmission with this id and returned it."""


@dataclass(slots=True, eq=False)
class Transmission:
    """One transmission of a reply over one connection; a repeated request has several."""

    id: str
    own: bool
    """Whether it goes to asyncrl's own client."""
    transport: Transport | None = None
    handed: bool = False
    """Every byte was passed to the transport."""
    followed: bool = False
    """Another request came over the same connection, so the client has read this reply to its end."""
    broken: bool = False
    """The connection was reset, or closed before every byte was sent."""
    closed: bool = False

    @property
    def sent(self) -> bool:
        """Whether every byte was passed to the socket."""
        return self.handed and (self.closed or self.transport is None or not self.transport.get_write_buffer_size())

    def received(self, was_read: WasRead) -> bool:
        return was_read(self.id) if self.own else self.followed or (self.sent and not self.broken)

    def certainly_received(self, was_read: WasRead) -> bool:
        return was_read(self.id) if self.own else self.followed

    def certainly_lost(self, was_read: WasRead) -> bool:
        return self.broken or (self.own and self.closed and not was_read(self.id))


@dataclass(slots=True)
class Connections:
    """The open connections, and the last reply over each."""

    _transports: dict[tuple[str, int], Transport] = field(default_factory=dict)
    _last: dict[tuple[str, int], Transmission] = field(default_factory=dict)

    def opened(self, client: tuple[str, int], transport: Transport) -> None:
        self._transports[client] = transport

    def request(self, client: tuple[str, int]) -> None:
        """A request begins on this connection. HTTP/1.1 clients send it after they have read the reply before it."""
        if (last := self._last.pop(client, None)) is not None:
            last.followed = True

    def sending(self, client: tuple[str, int], transmission: Transmission) -> None:
        transmission.transport = self._transports.get(client)
        transmission.broken = transmission.closed = transmission.transport is None
        self._last[client] = transmission

    def closed(self, client: tuple[str, int], error: Exception | None) -> None:
        """The connection is gone. `error`: why it was reset; None: it was closed."""
        self._transports.pop(client, None)
        if (last := self._last.pop(client, None)) is not None:
            last.broken = error is not None or not last.handed
            last.closed = True
