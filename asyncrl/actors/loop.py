"""The actor: tickets in, trajectories out, new weights in between.

    buffer ──ticket──> a free slot: episode (engine ⇄ environment) ──trajectory──> buffer ──acknowledged──> acks log
       ▲                                  ▲
       └ credits: free slots              └ weights: verified, then loaded between two tokens

    loop       takes                       gives                         unblocked by
    tickets    tickets, when slots free    an episode task per ticket    a free slot, a ticket, new weights
    episode    one ticket (tickets.py)     a put or a fail; its slot     tokens, the environment, the acknowledgement
    weights    the newest version          pause, load, resume           a publication
    beat       counts                      metrics, a sign of life       the clock
    leases     (leases.py, a thread)       renewals, cancellations       the clock

The buffer may restart: every call to it is repeated until it answers. When the actor is stopped, it takes no more
tickets, gives its episodes `actors.drain_s` to finish, and releases the remaining tickets (departure.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Any

from asyncrl.actors.components import Components
from asyncrl.actors.concurrency import Concurrency
from asyncrl.actors.departure import LEAVE_S, drain
from asyncrl.actors.holding import LOOK_S, Holding
from asyncrl.actors.status import Status
from asyncrl.actors.tickets import HeldTickets
from asyncrl.buffer.client import TicketReply
from asyncrl.config import Config
from asyncrl.trajectory import Ticket

log = logging.getLogger(__name__)

POLL_S = 0.1
"""Longest time the buffer may hold a ticket request; kept short because new weights require a new request."""


class Actor:
    def __init__(self, name: str, config: Config, components: Components) -> None:
        self._name, self._config = name, config
        self._engine, self._buffer, self._reporter = components.engine, components.buffer, components.reporter
        self._updates, self._keeper, self._acks = components.updates, components.keeper, components.acks
        self._concurrency = Concurrency.of(config)
        self._holding = Holding(self._engine, self._updates, lambda: [h.ticket for h in self.tickets.playing.values()])
        self.tickets = HeldTickets(components, report=lambda: self._status.report(), holds=self._holding.until_held)
        self._status = Status(config.env.name, components, self.tickets, self._concurrency)
        self._stopping = False

    async def run(self, stop: asyncio.Event) -> None:
        """Returns after `stop` is set and every ticket is put or released. Raises EngineDied, WeightsMismatch
        or BufferRefused: each ends the actor."""
        self._reporter.waiting("buffer", "buffer")
        await self.tickets.calls.until_answered("hello", lambda: self._buffer.hello("actor"))
        self._reporter.waiting("weights", "learner")
        while not stop.is_set() and not await self._updates.look():
            self._keeper.beat()
            await asyncio.sleep(LOOK_S)
        self._keeper.start()
        loops = [asyncio.create_task(loop()) for loop in (self._take_tickets, self._take_weights, self._beat)]
        stopped = asyncio.create_task(stop.wait())
        try:
            ends: list[asyncio.Future[Any]] = [*loops, stopped, self.tickets.fatal]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for failed in (self.tickets.fatal, *loops):
                if failed.done():  # a loop ends only with an exception
                    failed.result()
            await self._leave(loops[0])
        finally:
            self._keeper.close()
            tasks = [*loops, stopped, *self.tickets.tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _take_tickets(self) -> None:
        while not self._stopping:
            self.tickets.changed.clear()
            issued: Sequence[Ticket] = ()
            if self._concurrency.free(self.tickets.busy):
                reply = await self.tickets.calls.until_answered("tickets", self._request_tickets)
                issued, self._status.no_ticket, self._concurrency.told = reply.tickets, reply.why, reply.slots
                self._holding.told(reply)
                for ticket in issued:
                    self.tickets.begin(ticket)
            if not issued:
                self._status.report()
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S / 2):
                        await self.tickets.changed.wait()

    def _request_tickets(self) -> Awaitable[TicketReply]:
        # The keeper renews all leases; they are listed here as well, for a buffer that has just restarted.
        leased = self._keeper.announced(time.monotonic())
        credits = self._concurrency.free(self.tickets.busy)
        return self._buffer.tickets(self._name, self._engine.held_version, credits, leased, POLL_S, self._acks.head)

    async def _take_weights(self) -> None:
        while True:
            if await self._holding.look():
                self._reporter.span("load", self._updates.load_s, self._engine.held_version[1])
                log.info("loaded weights %s.%s in %.3f s", *self._engine.held_version, self._updates.load_s)
                self.tickets.changed.set()
                self._status.report()
            await asyncio.sleep(LOOK_S)

    async def _beat(self) -> None:
        """A sign of life for the keeper twice a second, and metrics every `tracking.system_s`."""
        sent, system_s = 0.0, self._config.tracking.system_s
        while True:
            self._keeper.beat()
            self._status.report()
            await self._acks.flush()
            if self._concurrency.adjust(self.tickets.busy, self._engine.load_stats()):
                self.tickets.changed.set()
            if time.monotonic() - sent >= system_s:
                sent = time.monotonic()
                self._status.send_metrics()
            await asyncio.sleep(min(0.5, system_s))

    async def _leave(self, taking_tickets: asyncio.Task[None]) -> None:
        self._stopping = True
        self.tickets.changed.set()
        # A reply on its way may hold tickets; waiting for it lets them be released.
        await asyncio.wait([taking_tickets], timeout=LEAVE_S)
        seconds = self._config.actors.drain_s
        await drain(self._name, self.tickets, self._buffer, self._acks, seconds, self._engine)
        self._status.send_metrics()
