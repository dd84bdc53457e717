"""Whether the agent received an answer: what it did not receive taught it nothing, so it carries no loss.

An answer was received, by the best evidence there is, when
    a later request contains it, or
    asyncrl's own client read the whole body and returned it to the agent, or,
    from any other client: every byte was handed to the socket, and the connection was not reset or closed early by the
    end of the episode; a further request over the same connection makes that certain.
"""

from __future__ import annotations

from asyncio import Transport
from collections.abc import Callable
from dataclasses import dataclass, field

OWN_CLIENT = "x-asyncrl-client"
"""Header of requests of the client that asyncrl hands to the agent."""
ANSWER_ID = "x-asyncrl-answer"
"""Header of an answer: which transmission it is."""

WasRead = Callable[[str], bool]
"""Whether asyncrl's own client read the transmission of that id and returned it."""


@dataclass(slots=True, eq=False)
class Transmission:
    """One sending of an answer over one connection; an answer that is asked for again has several."""

    id: str
    own: bool
    """To asyncrl's own client."""
    transport: Transport | None = None
    handed: bool = False
    """Every byte was given to the transport."""
    followed: bool = False
    """Another request came over the same connection, so the client had read this answer to its end."""
    broken: bool = False
    """The connection was reset, or closed before every byte was sent."""
    closed: bool = False

    @property
    def sent(self) -> bool:
        """Every byte left for the socket."""
        return self.handed and (self.closed or self.transport is None or not self.transport.get_write_buffer_size())

    def received(self, was_read: WasRead) -> bool:
        return was_read(self.id) if self.own else self.followed or (self.sent and not self.broken)

    def certainly_received(self, was_read: WasRead) -> bool:
        return was_read(self.id) if self.own else self.followed

    def certainly_lost(self, was_read: WasRead) -> bool:
        return self.broken or (self.own and self.closed and not was_read(self.id))


@dataclass(slots=True)
class Connections:
    """The open connections, and the last answer that went over each."""

    _transports: dict[tuple[str, int], Transport] = field(default_factory=dict)
    _last: dict[tuple[str, int], Transmission] = field(default_factory=dict)

    def opened(self, client: tuple[str, int], transport: Transport) -> None:
        self._transports[client] = transport

    def request(self, client: tuple[str, int]) -> None:
        """A request begins on this connection. HTTP/1.1 clients send it after they have read the answer before it."""
        if (last := self._last.pop(client, None)) is not None:
            last.followed = True

    def sending(self, client: tuple[str, int], transmission: Transmission) -> None:
        transmission.transport = self._transports.get(client)
        transmission.broken = transmission.closed = transmission.transport is None
        self._last[client] = transmission

    def closed(self, client: tuple[str, int], error: Exception | None) -> None:
        """The connection is gone; `error`: it was reset."""
        self._transports.pop(client, None)
        if (last := self._last.pop(client, None)) is not None:
            last.broken = error is not None or not last.handed
            last.closed = True
