"""Requests repeated until the buffer answers, since it may be restarting: as coroutines, and as a blocking call."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, Protocol, TypeVar

from asyncrl.actors.leases import Lease
from asyncrl.buffer.client import BufferTimeout, TicketReply
from asyncrl.trajectory import Row, TicketId, Trajectory

log = logging.getLogger(__name__)
T = TypeVar("T")

PAUSE_S = (0.1, 2.0)
"""Before a call to a silent buffer is repeated: at first, and at most."""


class Buffer(Protocol):
    """`asyncrl.buffer.client.AsyncBufferClient`, which see."""

    async def hello(self, role: str) -> dict[str, Any]: ...
    async def tickets(
        self, actor: str, held: tuple[int, int], credits: int, leased: Sequence[Lease], wait_s: float
    ) -> TicketReply: ...
    async def put(self, trajectory: Trajectory) -> Literal["stored", "duplicate", "late"]: ...
    async def fail(self, id: TicketId, attempt: int, reason: str, detail: str) -> None: ...
    async def release(self, actor: str, leases: Sequence[Lease], prefixes: Sequence[Row | None] = ()) -> None: ...


class Calls:
    def __init__(self, tell: Callable[[], None]) -> None:
        """`tell` is called when the buffer falls silent."""
        self._tell = tell
        self._silent: set[str] = set()

    @property
    def silent(self) -> bool:
        """The buffer owes an answer past its deadline."""
        return bool(self._silent)

    async def until_answered(self, op: str, call: Callable[[], Awaitable[T]]) -> T:
        """The answer to `call`, however often it has to be asked. Its owner is the launcher, which restarts the
        buffer."""
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


def through_outages(call: Callable[[], T], patience_s: float, again: Callable[[], bool] = lambda: True) -> T:
    """What `call` returns, asked again while the buffer does not answer and `again` agrees. Raises BufferTimeout."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return call()
        except BufferTimeout as error:
            if time.monotonic() > deadline or not again():
                raise
            log.warning("%s Asking again.", error)
