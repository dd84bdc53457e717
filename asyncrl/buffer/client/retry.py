"""Repetition: when a request is sent again, and when a call that timed out is made again. The buffer may be restarting.

One schedule serves both: waits double from the first to the longest, until the time is over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, Protocol, TypeVar

from asyncrl.buffer.client.errors import BufferTimeout
from asyncrl.buffer.client.messages import Head, TicketReply
from asyncrl.trajectory import Lease, LogHead, TicketId, Trajectory
from asyncrl.trajectory.turns import Recorded
from asyncrl.user_errors import Cause

log = logging.getLogger(__name__)
T = TypeVar("T")

RESEND_S = (1.0, 4.0)
"""Before a request without a reply is sent again: at first, and at most."""
PAUSE_S = (0.1, 2.0)
"""Before a call that timed out is repeated: at first, and at most."""


class Schedule:
    """
    >>> times = iter([0.0, 0.0, 1.0, 3.0, 6.5, 7.0])
    >>> schedule = Schedule((1.0, 4.0), 7.0, lambda: next(times))
    >>> [schedule.next_wait() for _ in range(5)]
    [1.0, 2.0, 4.0, 0.5, None]
    """

    def __init__(
        self, waits_s: tuple[float, float], total_s: float = float("inf"), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._wait_s, self._longest_s = waits_s
        self._clock = clock
        self._began = clock()
        self._deadline = self._began + total_s

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._began

    def next_wait(self) -> float | None:
        """Seconds until the next attempt; None: the time is over."""
        left = self._deadline - self._clock()
        wait, self._wait_s = self._wait_s, min(2 * self._wait_s, self._longest_s)
        return min(wait, left) if left > 0 else None


class Buffer(Protocol):
    """What an actor asks of the buffer: see `asyncrl.buffer.client.AsyncBufferClient`."""

    async def hello(self, role: str) -> Head: ...
    async def tickets(
        self,
        actor: str,
        held: tuple[int, int],
        credits: int,
        leased: Sequence[Lease],
        wait_s: float,
        logged: LogHead | None = None,
    ) -> TicketReply: ...
    async def put(self, trajectory: Trajectory) -> Literal["stored", "duplicate", "late"]: ...
    async def turn(self, id: TicketId, attempt: int, record: Recorded) -> Literal["stored", "revoked", "full"]: ...
    async def fail(self, id: TicketId, attempt: int, reason: str, detail: str, cause: Cause | None = None) -> None: ...
    async def release(self, actor: str, leases: Sequence[Lease]) -> None: ...


class Calls:
    """Repeats calls to the buffer until they are answered. The launcher restarts a buffer that died."""

    def __init__(self, tell: Callable[[], None]) -> None:
        """`tell` is called when a call has timed out."""
        self._tell = tell
        self._unanswered: set[str] = set()

    @property
    def silent(self) -> bool:
        """A call has timed out and is being repeated."""
        return bool(self._unanswered)

    async def until_answered(self, op: str, call: Callable[[], Awaitable[T]]) -> T:
        """The answer to `call`, which is repeated without a limit."""
        schedule = Schedule(PAUSE_S)
        while True:
            try:
                answer = await call()
            except BufferTimeout as error:
                if not self._unanswered:
                    log.warning("%s; repeated until it answers", error)
                self._unanswered.add(op)
                self._tell()
                await asyncio.sleep(schedule.next_wait() or 0.0)
            else:
                self._unanswered.discard(op)
                return answer


def through_outages(call: Callable[[], T], patience_s: float, may_repeat: Callable[[], bool] = lambda: True) -> T:
    """The answer to `call`, which is repeated while the buffer does not answer and `may_repeat` agrees, for
    `patience_s`. Raises BufferTimeout."""
    schedule = Schedule(PAUSE_S, patience_s)
    while True:
        try:
            return call()
        except BufferTimeout as error:
            pause_s = schedule.next_wait()
            if pause_s is None or not may_repeat():
                raise
            log.warning("%s Asking again.", error)
            time.sleep(pause_s)
