"""Which weights an actor holds: the newest, or those to which an evaluation is pinned that it plays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from asyncrl.actors.engines.protocol import Engine
from asyncrl.actors.weight_updates import WeightUpdates
from asyncrl.buffer.client import TicketReply
from asyncrl.trajectory import Ticket

LOOK_S = 0.02
"""Seconds between two looks for new weights; a look costs one stat."""


class Holding:
    def __init__(self, engine: Engine, updates: WeightUpdates, playing: Callable[[], Sequence[Ticket]]) -> None:
        """`playing`: the tickets whose episodes are in progress."""
        self._engine, self._updates, self._playing = engine, updates, playing
        self._asked: tuple[int, int] | None = None
        """What the buffer asked for last."""

    def told(self, reply: TicketReply) -> None:
        self._asked = next((ticket.min_version for ticket in reply.tickets if ticket.kind == "eval"), reply.hold)

    async def look(self) -> bool:
        """Takes over what is to be held, if there is something to load. Returns whether it was loaded."""
        return not self._stays() and await self._updates.look(self._stays, self._pinned())

    async def until_held(self, ticket: Ticket) -> None:
        """Waits until the engine has the weights to which an evaluation ticket is pinned: it may have begun to load
        others while the ticket was on its way."""
        pinned = ticket.min_version if ticket.kind == "eval" else None
        while pinned and (self._engine.held_version != pinned or self._updates.loading):  # noqa: ASYNC110 - of the engine
            await asyncio.sleep(LOOK_S)

    def _stays(self) -> bool:
        """Whether no other weights may be loaded now.

        An evaluation measures one version: none is loaded before its episodes end, and to one that is older than what
        an episode's ticket asks for the actor goes back when that episode has ended.
        """
        pinned = self._pinned()
        return pinned is not None and (
            self._engine.held_version == pinned or any(ticket.min_version > pinned for ticket in self._playing())
        )

    def _pinned(self) -> tuple[int, int] | None:
        """The weights to hold: those of the evaluation episodes in progress, or those that the buffer asked for."""
        evaluating = (ticket.min_version for ticket in self._playing() if ticket.kind == "eval")
        return next(evaluating, self._asked)
