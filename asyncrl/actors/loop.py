"""The actor: tickets in, trajectories out, new weights in between.

    buffer ──ticket──> a free slot: episode (engine ⇄ environment) ──trajectory──> buffer ──acknowledged──> acks log
       ▲                                  ▲
       └ credits: free slots              └ weights: verified, then loaded between two tokens

    loop       takes                       gives                         unblocked by
    tickets    tickets, when slots free    an episode task per ticket    a slot that became free, a ticket, new weights
    episode    one ticket                  put, or fail; the slot        tokens, the environment, the acknowledgement
    weights    the newest version          pause, load, resume           a publication
    beat       counts                      metrics, a sign of life       the clock
    leases     (leases.py, a thread)       renewals, cancellations       the clock

The buffer may restart: every call to it is repeated until it answers. Told to stop, the actor takes no more tickets,
gives its episodes `actors.drain_s` to finish and the rest of its tickets back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from typing import Any

from asyncrl.actors.ack_log import AckLog
from asyncrl.actors.concurrency import Slots
from asyncrl.actors.engines.protocol import Engine
from asyncrl.actors.leases import Lease, LeaseKeeper
from asyncrl.actors.player import Play
from asyncrl.actors.tickets import LEAVE_S, Lent
from asyncrl.actors.weight_updates import Updates
from asyncrl.buffer.client import TicketReply
from asyncrl.buffer.client.retry import Buffer, Calls
from asyncrl.config import Config
from asyncrl.tracking.reporter import Reporter

log = logging.getLogger(__name__)

POLL_S = 0.1
"""How long the buffer may hold a request for tickets: with new weights the actor must ask anew."""
ANNOUNCE_S = 1.0
"""Between two requests for tickets that say what is held: with every one, that would be most of what they cost."""
LOOK_S = 0.02
"""Between two looks for new weights; a look costs one stat."""


class Actor:
    def __init__(
        self,
        name: str,
        config: Config,
        *,
        engine: Engine,
        play: Play,
        buffer: Buffer,
        updates: Updates,
        keeper: LeaseKeeper,
        reporter: Reporter,
        acks: AckLog,
    ) -> None:
        self._name, self._config, self._engine = name, config, engine
        self._buffer, self._updates, self._keeper, self._reporter = buffer, updates, keeper, reporter
        self._slots = Slots.of(config)
        self._changed = asyncio.Event()
        """A slot became free, or new weights are held."""
        self._calls = Calls(self._tell)
        self.lent = Lent(name, play, buffer, self._calls, keeper, acks, changed=self._changed.set, tell=self._tell)
        self._stopping = self._lent_eval = False
        """The last answer held tickets of an evaluation: the next one may, too."""
        self._why = ""
        self._announced = float("-inf")
        self._paused_at_last = (time.monotonic(), 0.0)

    async def run(self, stop: asyncio.Event) -> None:
        """Returns after `stop` is set, all that was played put or given back. Raises what ends an actor: EngineDied,
        WeightsMismatch, and a refusal of the buffer."""
        self._reporter.waiting("buffer", "buffer")
        await self._calls.until_answered("hello", lambda: self._buffer.hello("actor"))
        self._reporter.waiting("weights", "learner")
        while not stop.is_set() and not await self._updates.look():
            self._keeper.beat()
            await _sleep_until(stop, LOOK_S)
        self._keeper.start()
        loops = [asyncio.create_task(loop()) for loop in (self._take_tickets, self._take_weights, self._beat)]
        stopped = asyncio.create_task(stop.wait())
        try:
            ends: list[asyncio.Future[Any]] = [*loops, stopped, self.lent.fatal]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for failed in (self.lent.fatal, *loops):
                if failed.done():  # a loop ends only by what it raises
                    failed.result()
            await self._leave(loops[0])
        finally:
            self._keeper.close()
            episodes = self.lent.tasks
            for task in (*loops, stopped, *episodes):
                task.cancel()
            await asyncio.gather(*loops, stopped, *episodes, return_exceptions=True)

    # The loops.

    async def _take_tickets(self) -> None:
        while not self._stopping:
            self._changed.clear()
            taken = 0
            if self._free():
                reply = await self._calls.until_answered("tickets", self._ask)
                taken, self._why = len(reply.tickets), reply.why
                self._lent_eval = any(ticket.kind == "eval" for ticket in reply.tickets)
                for ticket in reply.tickets:
                    self.lent.begin(ticket)
            if not taken:
                self._tell()
                await _sleep_until(self._changed, POLL_S / 2)

    def _free(self) -> int:
        return max(0, self._slots.now - self._busy())

    def _busy(self) -> int:
        """An episode that is over, and waits for the others of its group, takes up no slot."""
        return sum(slot.progress.phase != "put" for slot in self.lent.playing.values())

    def _ask(self) -> Awaitable[TicketReply]:
        # The keeper renews all leases; they are said here as well, for a buffer that has just begun.
        leased: Sequence[Lease] = ()
        if (now := time.monotonic()) - self._announced >= ANNOUNCE_S:
            self._announced, leased = now, self._keeper.leased()
        return self._buffer.tickets(self._name, self._engine.held, self._free(), leased, POLL_S)

    async def _take_weights(self) -> None:
        while True:
            if not self._evaluates() and await self._updates.look(self._evaluates):
                log.info("holds version %s.%s after %.3f s", *self._engine.held, self._updates.load_s)
                self._changed.set()
                self._tell()
            await asyncio.sleep(LOOK_S)

    def _evaluates(self) -> bool:
        """An evaluation is of one version: its episodes end before the next one is taken over."""
        return self._lent_eval or any(slot.ticket.kind == "eval" for slot in self.lent.playing.values())

    async def _beat(self) -> None:
        """A sign of life for the keeper twice a second, and metrics every `tracking.system_s`."""
        sent = 0.0
        while True:
            self._keeper.beat()
            self._tell()
            if self._slots.look(self._busy(), self._engine.load_stats()):
                self._changed.set()
            if time.monotonic() - sent >= self._config.tracking.system_s:
                sent = time.monotonic()
                self._reporter.metrics(self.metrics())
            await asyncio.sleep(min(0.5, self._config.tracking.system_s))

    async def _leave(self, tickets: asyncio.Task[None]) -> None:
        self._stopping = True
        self._changed.set()
        # An answer that is on its way may hold tickets: it is waited for, so that they can be given back.
        await asyncio.wait([tickets], timeout=LEAVE_S)
        actors = self._config.actors
        await self.lent.drain(actors.drain_s, self._engine if actors.resume_episodes else None)
        self._reporter.metrics(self.metrics())

    # What it says about itself.

    def _tell(self) -> None:
        cause, on = self._cause()
        self._reporter.waiting(cause, on)

    def _cause(self) -> tuple[str | None, str]:
        if self._updates.loading:
            return "weights", ""
        if any(s.progress.phase == "generate" for s in self.lent.playing.values()):
            return None, ""
        if self._calls.silent:
            return "buffer", "buffer"
        if self.lent.playing:
            return "environment", self._config.env.name
        if self.lent.putting:
            return "put", "buffer"
        return "ticket", f"buffer: {self._why}" if self._why else "buffer"

    def metrics(self) -> dict[str, float]:
        """Series by name (tracking/series.py)."""
        stats = self._engine.load_stats()
        now, paused_s = time.monotonic(), stats["paused_s"]
        then, paused_before = self._paused_at_last
        self._paused_at_last = now, paused_s
        return {
            "throughput/tokens_generated": stats["generated"],
            "throughput/tokens_wasted/aborted": float(self.lent.counts.aborted_tokens),
            "throughput/episodes": float(self.lent.counts.episodes),
            "throughput/prefix_breaks": float(self.lent.counts.prefix_breaks),
            "throughput/requests_running": stats["running"],
            "throughput/requests_waiting": stats["waiting"],
            "throughput/slots": float(self._slots.now),
            "throughput/slots_busy": self._busy() / self._slots.now,
            "throughput/kv_use": stats["kv_use"],
            "weights/held_version": float(self._engine.held[1]),
            "weights/load_s": self._updates.load_s,
            "weights/paused_share": min(1.0, (paused_s - paused_before) / max(now - then, 1e-9)),
            "weights/updates": float(self._updates.count),
        }


async def _sleep_until(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
