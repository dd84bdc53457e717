"""The tickets that this actor holds, each from its arrival until the buffer has acknowledged its trajectory or failure.

takes          a ticket (begin)
gives          put, or fail; a line in the acks log before each put, and one per acknowledged training trajectory
unblocked by   the end of the episode; the acknowledgement; the keeper, which gives an episode up

begin ──> playing: an episode, in a slot ──> putting: over, waits for its acknowledgement ──> acknowledged
             │                                 ^
             ├──failed, given up───────────────┘
             ├──revoked by the buffer: forgotten
             └──released when the actor leaves (departure.py)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from asyncrl.actors.components import Components
from asyncrl.actors.counts import Counts
from asyncrl.actors.episodes.environment_calls import EpisodeFailed
from asyncrl.actors.episodes.progress import Progress
from asyncrl.actors.episodes.recorded.keeping import OVER, keeping
from asyncrl.actors.episodes.resumption import Interrupted
from asyncrl.buffer.client import BufferRefused
from asyncrl.buffer.client.retry import Calls
from asyncrl.trajectory import Lease, Ticket, Trajectory

log = logging.getLogger(__name__)

Holds = Callable[[Ticket], Awaitable[None]]


@dataclass(slots=True)
class HeldTicket:
    """A ticket and the episode that it permits."""

    ticket: Ticket
    progress: Progress
    task: asyncio.Task[None] | None = None
    given_up: tuple[str, str] | None = None
    """(reason, detail), set before the task is cancelled."""
    interrupted: bool = False
    """The episode ended so that its ticket can be released."""

    @property
    def lease(self) -> Lease:
        return self.ticket.id, self.ticket.attempt


class HeldTickets:
    def __init__(self, components: Components, *, report: Callable[[], None], holds: Holds) -> None:
        """`report` is called when what the actor waits for may have changed. `holds` waits until the engine has the
        weights that a ticket needs."""
        self.counts = Counts()
        self.playing: dict[Lease, HeldTicket] = {}
        self.putting: dict[Lease, HeldTicket] = {}
        self.changed = asyncio.Event()
        """Set when a slot became free."""
        self.fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with the error that ends the actor."""
        self.calls = Calls(report)
        self._play, self._buffer = components.play, components.buffer
        self._keeper, self._acks, self._report, self._holds = components.keeper, components.acks, report, holds

    @property
    def busy(self) -> int:
        """Slots in use. An episode that is over and waits for the others of its group takes up none."""
        return sum(held.progress.phase != "put" for held in self.playing.values())

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return [held.task for held in (*self.playing.values(), *self.putting.values()) if held.task]

    def begin(self, ticket: Ticket) -> None:
        keep = keeping(ticket, self._buffer, self.calls, self._acks.recorded)
        held = HeldTicket(ticket, Progress(time.monotonic(), changed=self._report, keep=keep))
        loop = asyncio.get_running_loop()

        def give_up(reason: str, detail: str) -> None:
            loop.call_soon_threadsafe(self._give_up, held, reason, detail)

        self.playing[held.lease] = held
        self._keeper.hold(held.lease, held.progress, give_up)
        held.task = asyncio.create_task(self._run(held))
        held.task.add_done_callback(self._ended)

    async def _run(self, held: HeldTicket) -> None:
        try:
            await self._holds(held.ticket)
            trajectory = await self._play(held.ticket, held.progress)
        except Interrupted:
            held.interrupted = True
        except EpisodeFailed as failed:
            log.warning("episode %s failed: %s", held.ticket.id, failed)
            await self._fail(held, failed)
        except asyncio.CancelledError:
            if held.given_up is None:
                raise
            reason, detail = held.given_up
            log.warning("episode given up: %s", detail)
            # The buffer itself revoked the lease, and expects no answer.
            await self._fail(held, EpisodeFailed(reason if reason != "revoked" else "", detail))
        else:
            await self._put(held, trajectory)
        finally:
            self.counts.add(held.progress)
            self._keeper.drop(held.lease)
            self.putting.pop(held.lease, None)
            self._free_slot(held)

    async def _put(self, held: HeldTicket, trajectory: Trajectory) -> None:
        unused_tokens = held.progress.tokens - trajectory.num_policy_tokens
        self.putting[held.lease] = held
        self._free_slot(held)
        trajectory = await self._acks.announced(trajectory)
        try:
            outcome = await self.calls.until_answered("put", lambda: self._buffer.put(trajectory))
        except BufferRefused as refused:
            log.error("episode %s: %s", trajectory.id, refused)
            # An invalid trajectory counts as a failure of its environment: retried, but not for ever.
            await self._fail(held, EpisodeFailed("" if refused.code in OVER else "env_error", str(refused)))
            return
        self.counts.episodes += 1
        self.counts.aborted_tokens += unused_tokens
        if outcome != "late" and trajectory.kind == "train":
            self._acks.write(trajectory)

    async def _fail(self, held: HeldTicket, failed: EpisodeFailed) -> None:
        """End an episode without a trajectory. An empty reason is not reported to the buffer."""
        self.counts.aborted_tokens += held.progress.tokens - held.progress.kept_tokens
        self._keeper.drop(held.lease)
        if failed.reason:
            self.putting[held.lease] = held
            self._free_slot(held)
            about = *held.lease, failed.reason, failed.detail, failed.cause
            try:
                await self.calls.until_answered("fail", lambda: self._buffer.fail(*about))
            except BufferRefused as refused:  # the attempt is not of this actor any more
                log.error("episode %s: %s", held.ticket.id, refused)

    def _free_slot(self, held: HeldTicket) -> None:
        self.playing.pop(held.lease, None)
        self.changed.set()
        self._report()

    def _give_up(self, held: HeldTicket, reason: str, detail: str) -> None:
        if held.task is not None and held.lease in self.playing:
            held.given_up = (reason, detail)
            held.task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """An error that `_run` does not handle ends the actor."""
        if not task.cancelled() and (error := task.exception()) is not None and not self.fatal.done():
            self.fatal.set_exception(error)
