"""Ends an actor's work: episodes finish, or their tickets are released, with what is recorded of them.

drain_s: episodes finish ──> INTERRUPT_S: turns end early ──> release the rest ──> LEAVE_S: the last puts

Any turn of a durable ticket ends early, its tokens recorded in the buffer (`buffer.turns`).
"""

from __future__ import annotations

import asyncio
import logging

from asyncrl.actors.ack_log import AckLog
from asyncrl.actors.engines.protocol import Engine
from asyncrl.actors.episodes.progress import Progress
from asyncrl.actors.tickets import HeldTicket, HeldTickets
from asyncrl.buffer.client import BufferRefused, BufferTimeout
from asyncrl.buffer.client.retry import Buffer

log = logging.getLogger(__name__)

LEAVE_S = 5.0
"""Seconds for the last puts, and for the release, when an actor stops."""
INTERRUPT_S = 1.0
"""Seconds for the engine to end the interrupted requests; at most half of `actors.drain_s`."""


async def drain(name: str, tickets: HeldTickets, buffer: Buffer, acks: AckLog, seconds: float, engine: Engine) -> None:
    """Give episodes `seconds` to finish, release the tickets of the others, and wait for the last puts."""

    def may_hand_over(held: HeldTicket) -> bool:
        return held.ticket.kind == "train" and held.ticket.durable

    any_may = any(map(may_hand_over, tickets.playing.values()))
    interrupting_s = min(INTERRUPT_S, seconds / 2) if any_may else 0.0
    if playing := [held.task for held in tickets.playing.values() if held.task]:
        log.info("stopping: %d episodes have %.1f s to finish", len(playing), seconds)
        await asyncio.wait(playing, timeout=seconds - interrupting_s)
    unfinished = list(tickets.playing.values())
    if any_may:
        await _interrupt([held.progress for held in unfinished if may_hand_over(held)], engine, interrupting_s)
    for held in unfinished:
        # One that finished meanwhile is being put; one that was handed over ends by itself and closes its env.
        if held.task and held.lease in tickets.playing and not held.progress.handed_over:
            held.task.cancel()
    released = [held for held in unfinished if held.interrupted or held.lease in tickets.playing]
    await _release(name, buffer, acks, released)
    if putting := [held.task for held in tickets.putting.values() if held.task]:
        _, late = await asyncio.wait(putting, timeout=LEAVE_S)
        if late:
            log.warning("%d episodes were not acknowledged in time: their leases lapse", len(late))


async def _interrupt(unfinished: list[Progress], engine: Engine, seconds: float) -> None:
    begun = [progress for progress in unfinished if progress.interruptible]
    for progress in begun:
        progress.interrupted = True
    try:
        async with asyncio.timeout(max(seconds, 0.1)):
            await asyncio.gather(*(engine.abort(progress.interruptible) for progress in begun))
            while any(progress.interruptible for progress in begun):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    except TimeoutError:
        # An episode whose turn ended meanwhile plays on; it is cancelled, like those whose engine does not answer.
        log.info("not all requests were interrupted in time")


async def _release(name: str, buffer: Buffer, acks: AckLog, unfinished: list[HeldTicket]) -> None:
    if not unfinished:
        return
    leases = [held.lease for held in unfinished]
    sampled = sum(held.progress.handed_over for held in unfinished)
    log.info("releasing %d tickets, %d with sampled tokens", len(leases), sampled)
    try:
        async with asyncio.timeout(LEAVE_S):
            await acks.flush()
            await buffer.release(name, leases)
    except (BufferTimeout, BufferRefused, TimeoutError) as error:
        log.warning("%d tickets were not released, and their leases lapse: %s", len(leases), error)
