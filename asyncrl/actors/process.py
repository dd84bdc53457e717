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
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from asyncrl.actors.acks import AckLog
from asyncrl.actors.engines.protocol import Engine
from asyncrl.actors.episode import EpisodeFailed, Progress
from asyncrl.actors.leases import Lease, LeaseKeeper
from asyncrl.actors.playing import Play
from asyncrl.actors.slots import Slots
from asyncrl.actors.updates import Updates
from asyncrl.buffer.client import BufferRefused, BufferTimeout, TicketReply
from asyncrl.config import Config
from asyncrl.tracking.reporter import Reporter
from asyncrl.trajectory import Ticket, TicketId, Trajectory

log = logging.getLogger(__name__)
T = TypeVar("T")

POLL_S = 0.1
"""How long the buffer may hold a request for tickets: with new weights the actor must ask anew."""
LOOK_S = 0.02
"""Between two looks for new weights; a look costs one stat."""
PAUSE_S = (0.1, 2.0)
"""Before a call to a silent buffer is repeated: at first, and at most."""
LEAVE_S = 5.0
"""For the last puts, and the release, of an actor that stops."""


class Buffer(Protocol):
    """What the actor asks of the buffer: `asyncrl.buffer.client.AsyncBufferClient`, which see."""

    async def hello(self, role: str) -> dict[str, Any]: ...
    async def tickets(
        self, actor: str, held: tuple[int, int], credits: int, leased: Sequence[Lease], wait_s: float
    ) -> TicketReply: ...
    async def put(self, trajectory: Trajectory) -> Literal["stored", "duplicate", "late"]: ...
    async def fail(self, id: TicketId, attempt: int, reason: str, detail: str) -> None: ...
    async def release(self, actor: str, leases: Sequence[Lease]) -> None: ...


@dataclass(slots=True)
class _Slot:
    """One ticket from its arrival to its acknowledgement."""

    ticket: Ticket
    progress: Progress
    task: asyncio.Task[None] | None = None
    given_up: tuple[str, str] | None = None
    """(reason, detail), set before the task is cancelled."""

    @property
    def lease(self) -> Lease:
        return self.ticket.id, self.ticket.attempt


@dataclass(slots=True)
class Counts:
    """Since the start of the process."""

    episodes: int = 0
    aborted_tokens: int = 0
    """Of episodes that became no trajectory, and such as no trajectory holds: nobody read them, a stop string came."""
    prefix_breaks: int = 0


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
        self.counts = Counts()
        self._name, self._config = name, config
        self._engine, self._play = engine, play
        self._buffer, self._updates, self._keeper = buffer, updates, keeper
        self._reporter, self._acks = reporter, acks
        self._slots = Slots.of(config)
        self._playing: dict[Lease, _Slot] = {}
        """Takes up a slot; an episode that is over and waits for its acknowledgement does not."""
        self._putting: dict[Lease, _Slot] = {}
        self._changed = asyncio.Event()
        """A slot became free, or new weights are held."""
        self._fatal: asyncio.Future[None]
        self._stopping = False
        self._silent: set[str] = set()
        self._why = ""
        self._paused_at_last = (time.monotonic(), 0.0)

    async def run(self, stop: asyncio.Event) -> None:
        """Returns after `stop` is set, all that was played put or given back. Raises what ends an actor: EngineDied,
        WeightsMismatch, and a refusal of the buffer."""
        self._reporter.waiting("buffer", "buffer")
        await self._until_answered("hello", lambda: self._buffer.hello("actor"))
        self._reporter.waiting("weights", "learner")
        while not stop.is_set() and not await self._updates.look():
            self._keeper.beat()
            await _sleep_until(stop, LOOK_S)
        self._keeper.start()
        self._fatal = asyncio.get_running_loop().create_future()
        loops = [asyncio.create_task(loop()) for loop in (self._take_tickets, self._take_weights, self._beat)]
        stopped = asyncio.create_task(stop.wait())
        try:
            ends: list[asyncio.Future[Any]] = [*loops, stopped, self._fatal]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for failed in (self._fatal, *loops):
                if failed.done():  # a loop ends only by what it raises
                    failed.result()
            await self._leave(loops[0])
        finally:
            self._keeper.close()
            episodes = [slot.task for slot in (*self._playing.values(), *self._putting.values()) if slot.task]
            for task in (*loops, stopped, *episodes):
                task.cancel()
            await asyncio.gather(*loops, stopped, *episodes, return_exceptions=True)

    # The loops.

    async def _take_tickets(self) -> None:
        while not self._stopping:
            self._changed.clear()
            taken = 0
            if self._free():
                reply = await self._until_answered("tickets", self._ask)
                taken, self._why = len(reply.tickets), reply.why
                for ticket in reply.tickets:
                    self._begin(ticket)
            if not taken:
                self._tell()
                await _sleep_until(self._changed, POLL_S / 2)

    def _free(self) -> int:
        return max(0, self._slots.now - len(self._playing))

    def _ask(self) -> Awaitable[TicketReply]:
        return self._buffer.tickets(self._name, self._engine.held, self._free(), self._keeper.leased(), POLL_S)

    def _begin(self, ticket: Ticket) -> None:
        slot = _Slot(ticket, Progress(time.monotonic(), changed=self._tell))
        loop = asyncio.get_running_loop()

        def give_up(reason: str, detail: str) -> None:
            loop.call_soon_threadsafe(self._give_up, slot, reason, detail)

        self._playing[slot.lease] = slot
        self._keeper.hold(slot.lease, slot.progress, give_up)
        slot.task = asyncio.create_task(self._episode(slot))
        slot.task.add_done_callback(self._over)

    async def _episode(self, slot: _Slot) -> None:
        ticket = slot.ticket
        try:
            trajectory = await self._play(ticket, slot.progress)
        except EpisodeFailed as failed:
            log.warning("episode %s failed: %s", ticket.id, failed)
            await self._failed(slot, failed.reason, failed.detail)
        except asyncio.CancelledError:
            if slot.given_up is None:
                raise
            reason, detail = slot.given_up
            log.warning("episode given up: %s", detail)
            # A revoked lease is the buffer's own decision; it waits for no answer to it.
            await self._failed(slot, reason if reason != "revoked" else "", detail)
        else:
            await self._put(slot, trajectory)
        finally:
            self._forget(slot)

    async def _put(self, slot: _Slot, trajectory: Trajectory) -> None:
        unused_tokens = slot.progress.tokens - trajectory.num_policy_tokens
        self._hand_in(slot)
        try:
            outcome = await self._until_answered("put", lambda: self._buffer.put(trajectory))
        except BufferRefused as refused:
            log.error("episode %s: %s", trajectory.id, refused)
            # A trajectory that nobody may train on counts as its environment's fault: retried, and not for ever.
            await self._failed(slot, "" if refused.code == "unknown_ticket" else "env_error", str(refused))
            return
        self.counts.episodes += 1
        self.counts.aborted_tokens += unused_tokens
        if outcome != "late" and trajectory.kind == "train":
            self._acks.write(trajectory)

    async def _failed(self, slot: _Slot, reason: str, detail: str) -> None:
        self.counts.aborted_tokens += slot.progress.tokens
        self._keeper.drop(slot.lease)
        if reason:
            self._hand_in(slot)
            id, attempt = slot.lease
            await self._until_answered("fail", lambda: self._buffer.fail(id, attempt, reason, detail))

    def _hand_in(self, slot: _Slot) -> None:
        """The slot is free; what is left is to tell the buffer."""
        self._playing.pop(slot.lease, None)
        self._putting[slot.lease] = slot
        self._changed.set()
        self._tell()

    def _forget(self, slot: _Slot) -> None:
        self.counts.prefix_breaks += slot.progress.prefix_breaks
        self._keeper.drop(slot.lease)
        self._playing.pop(slot.lease, None)
        self._putting.pop(slot.lease, None)
        self._changed.set()
        self._tell()

    def _give_up(self, slot: _Slot, reason: str, detail: str) -> None:
        if slot.task is not None and slot.lease in self._playing:
            slot.given_up = (reason, detail)
            slot.task.cancel()

    def _over(self, task: asyncio.Task[None]) -> None:
        """An exception that is not an episode's affair ends the actor."""
        if not task.cancelled() and (error := task.exception()) is not None and not self._fatal.done():
            self._fatal.set_exception(error)

    async def _take_weights(self) -> None:
        while True:
            # An evaluation is of one version: its episodes end before the next one is taken over.
            if not any(s.ticket.kind == "eval" for s in self._playing.values()) and await self._updates.look():
                log.info("holds version %s.%s after %.3f s", *self._engine.held, self._updates.load_s)
                self._changed.set()
                self._tell()
            await asyncio.sleep(LOOK_S)

    async def _beat(self) -> None:
        """A sign of life for the keeper twice a second, and metrics every `tracking.system_s`."""
        sent = 0.0
        while True:
            self._keeper.beat()
            self._tell()
            if self._slots.look(len(self._playing), self._engine.load_stats()):
                self._changed.set()
            if time.monotonic() - sent >= self._config.tracking.system_s:
                sent = time.monotonic()
                self._reporter.metrics(self.metrics())
            await asyncio.sleep(min(0.5, self._config.tracking.system_s))

    async def _leave(self, tickets: asyncio.Task[None]) -> None:
        """In order: no more tickets; drain; give back what was not finished; the last puts."""
        self._stopping = True
        self._changed.set()
        # An answer that is on its way may hold tickets: it is waited for, so that they can be given back.
        await asyncio.wait([tickets], timeout=LEAVE_S)
        if playing := [slot.task for slot in self._playing.values() if slot.task]:
            log.info("stops: %d episodes have %.0f s to finish", len(playing), self._config.actors.drain_s)
            await asyncio.wait(playing, timeout=self._config.actors.drain_s)
        if unfinished := list(self._playing.values()):
            for slot in unfinished:
                if slot.task:
                    slot.task.cancel()
            try:
                async with asyncio.timeout(LEAVE_S):
                    await self._buffer.release(self._name, [slot.lease for slot in unfinished])
            except (BufferTimeout, TimeoutError):
                log.warning("%d tickets were not given back: their leases lapse", len(unfinished))
        if putting := [slot.task for slot in self._putting.values() if slot.task]:
            _, late = await asyncio.wait(putting, timeout=LEAVE_S)
            if late:
                log.warning("%d episodes were not acknowledged in time: their leases lapse", len(late))
        self._reporter.metrics(self.metrics())

    async def _until_answered(self, op: str, call: Callable[[], Awaitable[T]]) -> T:
        """The buffer's answer, however often it has to be asked. Its owner is the launcher, which restarts it."""
        pause_s = PAUSE_S[0]
        while True:
            try:
                answer = await call()
            except BufferTimeout as error:
                if not self._silent:
                    log.warning("%s; repeated until it answers", error)
                self._silent.add(op)
                self._tell()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S[1])
            else:
                self._silent.discard(op)
                return answer

    # What it says about itself.

    def _tell(self) -> None:
        cause, on = self._cause()
        self._reporter.waiting(cause, on)

    def _cause(self) -> tuple[str | None, str]:
        if self._updates.loading:
            return "weights", ""
        if any(s.progress.phase == "generate" for s in self._playing.values()):
            return None, ""
        if self._silent:
            return "buffer", "buffer"
        if self._playing:
            return "environment", self._config.env.name
        if self._putting:
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
            "throughput/tokens_wasted/aborted": float(self.counts.aborted_tokens),
            "throughput/episodes": float(self.counts.episodes),
            "throughput/prefix_breaks": float(self.counts.prefix_breaks),
            "throughput/requests_running": stats["running"],
            "throughput/requests_waiting": stats["waiting"],
            "throughput/slots": float(self._slots.now),
            "throughput/slots_busy": len(self._playing) / self._slots.now,
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
