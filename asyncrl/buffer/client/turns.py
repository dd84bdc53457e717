"""Recorded turns on their way to the buffer: what comes while a reply is awaited goes together in the next request.

One request is under way at a time, so that the turns of an attempt arrive in their order also where one is sent again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from asyncrl.buffer.client.errors import BufferRefused
from asyncrl.buffer.client.messages import MAX_PUTS, Refusal, TurnOutcome, TurnRequest
from asyncrl.wire import Frame

Ask = Callable[[TurnRequest, Sequence[Frame]], Awaitable[list[TurnOutcome | Refusal]]]

_BYTES_AT_ONCE = 64 << 20
"""Most bytes in one request, unless it has a single turn."""


class TurnSender:
    """The turns of one actor, in the order in which they are given."""

    def __init__(self, ask: Ask, actor: str) -> None:
        self._ask, self._actor = ask, actor
        self._unsent: deque[tuple[bytes, asyncio.Future[TurnOutcome]]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._awaited: set[asyncio.Future[Any]] = set()

    async def send(self, frame: bytes) -> TurnOutcome:
        """Takes the turn's frame (`wire.turns.encode_turn`). Returns when the turn is durable, or revoked. Raises
        BufferRefused, BufferTimeout."""
        outcome: asyncio.Future[TurnOutcome] = asyncio.get_running_loop().create_future()
        self._awaited.add(outcome)
        outcome.add_done_callback(self._awaited.discard)
        self._unsent.append((frame, outcome))
        if self._task is None:
            self._task = asyncio.create_task(self._send_all(), name=f"{self._actor} turns")
        return await outcome

    async def close(self) -> None:
        """Turns that are not answered yet end as cancelled."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for outcome in list(self._awaited):
            outcome.cancel()

    async def _send_all(self) -> None:
        try:
            while self._unsent:
                sent = self._next()
                outcomes = await self._outcomes([frame for frame, _ in sent])
                for (_, awaited), outcome in zip(sent, outcomes, strict=True):
                    if awaited.done():
                        continue  # its caller was cancelled
                    if isinstance(outcome, Exception):
                        awaited.set_exception(outcome)
                    else:
                        awaited.set_result(outcome)
        finally:
            self._task = None

    def _next(self) -> list[tuple[bytes, asyncio.Future[TurnOutcome]]]:
        """One turn or more, as many as fit into a request."""
        taken, size = [self._unsent.popleft()], 0
        while self._unsent and len(taken) < MAX_PUTS:
            size += len(taken[-1][0])
            if size + len(self._unsent[0][0]) > _BYTES_AT_ONCE:
                break
            taken.append(self._unsent.popleft())
        return taken

    async def _outcomes(self, frames: Sequence[bytes]) -> Sequence[TurnOutcome | Exception]:
        try:
            answered = await self._ask(TurnRequest(self._actor), frames)
        except Exception as error:  # raised where these turns are awaited
            return [error] * len(frames)
        return [BufferRefused("turn", o.code, o.message) if isinstance(o, Refusal) else o for o in answered]
