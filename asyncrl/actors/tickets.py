"""The tickets that are lent to this actor: each from its arrival to its acknowledgement, or back.

begin ──> playing: an episode, in a slot ──> putting: over, waits for its acknowledgement ──> acknowledged
             │                                   ^
             ├──failed, given up, revoked────────┘ (told to the buffer, except what the buffer itself revoked)
             └──hand_back: the actor leaves; in its first turn with what was sampled
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.actors.ack_log import AckLog
from asyncrl.actors.engines.protocol import Engine
from asyncrl.actors.episodes.episode import EpisodeFailed, Progress
from asyncrl.actors.episodes.resumption import Interrupted
from asyncrl.actors.leases import Lease, LeaseKeeper
from asyncrl.actors.player import Play
from asyncrl.buffer.client import BufferRefused, BufferTimeout
from asyncrl.buffer.client.retry import Buffer, Calls
from asyncrl.trajectory import Ticket, Trajectory

log = logging.getLogger(__name__)

LEAVE_S = 5.0
"""For the last puts, and the release, of an actor that stops."""
INTERRUPT_S = 1.0
"""For the engine, to end the requests that are interrupted; less where `actors.drain_s` is."""


@dataclass(slots=True)
class Slot:
    """One ticket."""

    ticket: Ticket
    progress: Progress
    task: asyncio.Task[None] | None = None
    given_up: tuple[str, str] | None = None
    """(reason, detail), set before the task is cancelled."""
    interrupted: bool = False
    """The episode ended for its ticket to be handed back."""

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


class Lent:
    def __init__(
        self, name: str, play: Play, buffer: Buffer, calls: Calls, keeper: LeaseKeeper, acks: AckLog,
        *, changed: Callable[[], None], tell: Callable[[], None],
    ) -> None:  # fmt: skip
        """`changed`: a slot became free; `tell`: what the actor waits for may be something else now."""
        self.counts = Counts()
        self.playing: dict[Lease, Slot] = {}
        """Takes up a slot; an episode that is over and waits for its acknowledgement does not."""
        self.putting: dict[Lease, Slot] = {}
        self.fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with what ends the actor."""
        self._name, self._play, self._buffer, self._calls = name, play, buffer, calls
        self._keeper, self._acks = keeper, acks
        self._changed, self._tell = changed, tell

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return [slot.task for slot in (*self.playing.values(), *self.putting.values()) if slot.task]

    def begin(self, ticket: Ticket) -> None:
        slot = Slot(ticket, Progress(time.monotonic(), changed=self._tell))
        loop = asyncio.get_running_loop()

        def give_up(reason: str, detail: str) -> None:
            loop.call_soon_threadsafe(self._give_up, slot, reason, detail)

        self.playing[slot.lease] = slot
        self._keeper.hold(slot.lease, slot.progress, give_up)
        slot.task = asyncio.create_task(self._episode(slot))
        slot.task.add_done_callback(self._over)

    async def _episode(self, slot: Slot) -> None:
        ticket = slot.ticket
        try:
            trajectory = await self._play(ticket, slot.progress)
        except Interrupted:
            slot.interrupted = True
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

    async def _put(self, slot: Slot, trajectory: Trajectory) -> None:
        unused_tokens = slot.progress.tokens - trajectory.num_policy_tokens
        self._hand_in(slot)
        try:
            outcome = await self._calls.until_answered("put", lambda: self._buffer.put(trajectory))
        except BufferRefused as refused:
            log.error("episode %s: %s", trajectory.id, refused)
            # A trajectory that nobody may train on counts as its environment's fault: retried, and not for ever.
            await self._failed(slot, "" if refused.code == "unknown_ticket" else "env_error", str(refused))
            return
        self.counts.episodes += 1
        self.counts.aborted_tokens += unused_tokens
        if outcome != "late" and trajectory.kind == "train":
            self._acks.write(trajectory)

    async def _failed(self, slot: Slot, reason: str, detail: str) -> None:
        self.counts.aborted_tokens += slot.progress.tokens - slot.progress.taken_over
        self._keeper.drop(slot.lease)
        if reason:
            self._hand_in(slot)
            id, attempt = slot.lease
            await self._calls.until_answered("fail", lambda: self._buffer.fail(id, attempt, reason, detail))

    def _hand_in(self, slot: Slot) -> None:
        """The slot is free; what is left is to tell the buffer."""
        self.playing.pop(slot.lease, None)
        self.putting[slot.lease] = slot
        self._changed()
        self._tell()

    def _forget(self, slot: Slot) -> None:
        self.counts.prefix_breaks += slot.progress.prefix_breaks
        self._keeper.drop(slot.lease)
        self.playing.pop(slot.lease, None)
        self.putting.pop(slot.lease, None)
        self._changed()
        self._tell()

    def _give_up(self, slot: Slot, reason: str, detail: str) -> None:
        if slot.task is not None and slot.lease in self.playing:
            slot.given_up = (reason, detail)
            slot.task.cancel()

    def _over(self, task: asyncio.Task[None]) -> None:
        """An exception that is not an episode's affair ends the actor."""
        if not task.cancelled() and (error := task.exception()) is not None and not self.fatal.done():
            self.fatal.set_exception(error)

    # The actor leaves.

    async def drain(self, seconds: float, interrupt: Engine | None) -> None:
        """No more tickets begin. Within `seconds` episodes finish; what has not is given back, and the last puts are
        waited for. `interrupt`: the engine, whose requests for a first turn then end and leave their prefixes."""
        interrupting_s = min(INTERRUPT_S, seconds / 2) if interrupt is not None else 0.0
        if playing := [slot.task for slot in self.playing.values() if slot.task]:
            log.info("stops: %d episodes have %.1f s to finish", len(playing), seconds)
            await asyncio.wait(playing, timeout=seconds - interrupting_s)
        unfinished = list(self.playing.values())
        if interrupt is not None:
            await self._interrupt(unfinished, interrupt, interrupting_s)
        for slot in unfinished:
            if slot.task and slot.progress.prefix is None:  # else it closes its environment
                slot.task.cancel()
        await self._hand_back([slot for slot in unfinished if slot.interrupted or slot.lease in self.playing])
        if putting := [slot.task for slot in self.putting.values() if slot.task]:
            _, late = await asyncio.wait(putting, timeout=LEAVE_S)
            if late:
                log.warning("%d episodes were not acknowledged in time: their leases lapse", len(late))

    async def _interrupt(self, slots: list[Slot], engine: Engine, seconds: float) -> None:
        begun = [slot for slot in slots if slot.progress.interruptible and slot.ticket.kind == "train"]
        for slot in begun:
            slot.progress.interrupted = True
        try:
            async with asyncio.timeout(max(seconds, 0.1)):
                await asyncio.gather(*(engine.abort(slot.progress.interruptible) for slot in begun))
                while any(slot.progress.interruptible for slot in begun):  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        except TimeoutError:
            # One that has ended its turn instead goes on; it is cancelled, as are those whose engine does not answer.
            log.info("not all requests were interrupted in time")

    async def _hand_back(self, slots: list[Slot]) -> None:
        if not slots:
            return
        leases, prefixes = [slot.lease for slot in slots], [slot.progress.prefix for slot in slots]
        kept = sum(prefix is not None for prefix in prefixes)
        log.info("gives back %d tickets, %d with what was sampled", len(leases), kept)
        try:
            async with asyncio.timeout(LEAVE_S):
                await self._buffer.release(self._name, leases, prefixes)
        except (BufferTimeout, TimeoutError):
            log.warning("%d tickets were not given back: their leases lapse", len(leases))
