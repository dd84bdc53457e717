"""The actor's client: coroutines, any number at once, over one socket of the running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from asyncrl.buffer.client import codec, messages, retry
from asyncrl.buffer.client.errors import TOO_LARGE, BufferRefused, BufferTimeout
from asyncrl.buffer.client.messages import Head, PutOutcome, ReplyHeader, Request, TicketReply, TurnOutcome
from asyncrl.buffer.client.turns import TurnSender
from asyncrl.buffer.record import to_record, too_large
from asyncrl.sockets import Endpoint, Link
from asyncrl.trajectory import Lease, LogHead, TicketId, Trajectory
from asyncrl.trajectory.turns import Recorded
from asyncrl.user_errors import Cause
from asyncrl.wire import Frame
from asyncrl.wire.turns import encode_turn

T = TypeVar("T")

_PUTS_AT_ONCE = 8
"""Trajectories in one request ..."""
_SENDERS = 2
"""... and such requests under way: they keep the buffer busy, and more would only queue in memory."""


class AsyncBufferClient:
    """The methods do what those of `BufferClient` do."""

    def __init__(self, address: Endpoint | str, *, identity: str, deadline_s: float = 30.0) -> None:
        self.address = address
        self._identity = identity
        self._deadline_s = deadline_s
        self._numbers = itertools.count(1)
        self._link = Link(zmq.asyncio.Context.instance(), zmq.DEALER, address, identity=identity)
        self._socket = self._link.socket
        self._replies: dict[int, asyncio.Future[tuple[ReplyHeader, list[Frame]]]] = {}
        self._unsent: deque[tuple[Trajectory, asyncio.Future[PutOutcome]]] = deque()
        self._senders: set[asyncio.Task[None]] = set()
        self._sending = 0
        """Senders that look for more puts before they end."""
        self._putting: set[asyncio.Future[PutOutcome]] = set()
        """Puts that are awaited."""
        self._reader: asyncio.Task[None] | None = None
        self._turns = TurnSender(self._ask, identity)

    async def close(self) -> None:
        """Puts and turns that are not answered yet end as cancelled."""
        await self._turns.close()
        tasks = [*self._senders, *([self._reader] if self._reader is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in list(self._putting):
            outcome.cancel()
        self._link.close()

    async def hello(self, role: str) -> Head:
        return await self._ask(messages.HelloRequest(role, self._identity))

    async def tickets(
        self,
        actor: str,
        held: tuple[int, int],
        credits: int,
        leased: Sequence[Lease],
        wait_s: float,
        logged: LogHead | None = None,
    ) -> TicketReply:
        return await self._ask(messages.TicketsRequest(actor, held, credits, leased, wait_s, logged))

    async def put(self, trajectory: Trajectory) -> PutOutcome:
        outcome: asyncio.Future[PutOutcome] = asyncio.get_running_loop().create_future()
        self._putting.add(outcome)
        outcome.add_done_callback(self._putting.discard)
        self._unsent.append((trajectory, outcome))
        if self._sending < _SENDERS:
            self._sending += 1
            sender = asyncio.create_task(self._send_puts(), name=f"{self._identity} puts")
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)
        return await outcome

    async def _send_puts(self) -> None:
        """Sends until nothing is left. What is put while a reply is awaited goes together in the next request."""
        while self._unsent:
            sent = [self._unsent.popleft() for _ in range(min(len(self._unsent), _PUTS_AT_ONCE))]
            outcomes = await self._outcomes([trajectory for trajectory, _ in sent])
            for (_, awaited), outcome in zip(sent, outcomes, strict=True):
                if awaited.done():
                    continue  # its caller was cancelled
                if isinstance(outcome, Exception):
                    awaited.set_exception(outcome)
                else:
                    awaited.set_result(outcome)
        self._sending -= 1

    async def _outcomes(self, trajectories: Sequence[Trajectory]) -> Sequence[PutOutcome | Exception]:
        try:
            records = [to_record(t) for t in trajectories]
            beyond = [too_large(t, record) for t, record in zip(trajectories, records, strict=True)]
            sent = [record for record, why in zip(records, beyond, strict=True) if not why]
            answered = await self._ask(messages.PutRequest(), sent) if sent else []
        except Exception as error:  # raised where these puts are awaited
            return [error] * len(trajectories)
        answers = iter(answered)
        outcomes = [messages.Refusal(TOO_LARGE, why) if why else next(answers) for why in beyond]
        return [BufferRefused("put", o.code, o.message) if isinstance(o, messages.Refusal) else o for o in outcomes]

    async def turn(self, id: TicketId, attempt: int, record: Recorded) -> TurnOutcome:
        return await self._turns.send(encode_turn(id, attempt, record))

    async def fail(self, id: TicketId, attempt: int, reason: str, detail: str, cause: Cause | None = None) -> None:
        await self._ask(messages.FailRequest.of(self._identity, id, attempt, reason, detail, cause))

    async def release(self, actor: str, leases: Sequence[Lease]) -> None:
        await self._ask(messages.ReleaseRequest(actor, leases))

    async def _ask(self, request: Request[T], frames: Sequence[Frame] = ()) -> T:
        if self._reader is None:
            self._reader = asyncio.create_task(self._read(), name=f"{self._identity} buffer replies")
        n = next(self._numbers)
        message = [codec.encode_request(request, n), *frames]
        schedule = retry.Schedule(retry.RESEND_S, self._deadline_s + getattr(request, "wait_s", 0.0))
        reply = self._replies[n] = asyncio.get_running_loop().create_future()
        try:
            while (wait_s := schedule.next_wait()) is not None:
                # A socket that takes nothing is treated like a buffer that does not answer.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._socket.send_multipart(message, copy=False), wait_s)
                    awaited: list[asyncio.Future[Any]] = [reply, self._reader]
                    await asyncio.wait(awaited, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                    if reply.done():
                        return codec.decode_reply(request, *reply.result())
                    if self._reader.done():
                        self._reader.result()  # it ends only with what it raises
                self._link.follow()
        finally:
            del self._replies[n]
        raise BufferTimeout.after(schedule.elapsed_s, request.op, self.address)

    async def _read(self) -> None:
        while True:
            frames: list[Frame] = [frame.buffer for frame in await self._socket.recv_multipart(copy=False)]
            header = codec.decode_header(frames[0])
            reply = self._replies.get(header.n)
            if reply is not None and not reply.done():
                reply.set_result((header, frames[1:]))
