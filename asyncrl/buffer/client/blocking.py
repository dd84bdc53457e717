"""The one door to the buffer process: blocking, for anybody; as coroutines, for an actor's episodes.

Every call has a deadline and ends in its answer, `BufferTimeout` or `BufferRefused`. While the buffer restarts, calls
wait and are sent again: all of them may be repeated. One client per thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import zmq
import zmq.asyncio

from asyncrl.buffer.batches import Start
from asyncrl.buffer.client import messages
from asyncrl.buffer.client.messages import BatchReply, Held, PutOutcome, Request, TicketReply
from asyncrl.buffer.evaluation import EvalReply, EvalResult
from asyncrl.errors import RunError
from asyncrl.sockets import Endpoint, Link
from asyncrl.trajectory import Row, TicketId, Trajectory
from asyncrl.wire import Frame, pack, unpack

__all__ = [
    "AsyncBufferClient",
    "BatchReply",
    "BufferClient",
    "BufferRefused",
    "BufferTimeout",
    "EvalReply",
    "EvalResult",
    "LedgerRestored",
    "Start",
    "TicketReply",
]

T = TypeVar("T")

_RESEND_S = (1.0, 2.0, 4.0)
_MAX_REPLY_BYTES = 1 << 30
"""Of a reply's header: one with tickets holds their tasks, of any size; an evaluation's, all its results."""
_PUTS_AT_ONCE = 8
"""In one request of an AsyncBufferClient ..."""
_SENDERS = 2
"""... of which it has so many under way: they keep the buffer busy, and more would only queue in memory."""


class BufferTimeout(RunError):
    """No answer in time."""


class BufferRefused(RunError):
    """The buffer answered with an error; `code` says which: stale_incarnation, stale_branch, unknown_ticket,
    bad_trajectory, malformed, unknown_checkpoint, not_fixed, conflict, payload_lost ..."""

    def __init__(self, op: str, code: str, message: str) -> None:
        super().__init__(f"the buffer refused {op}: {message} ({code})")
        self.code = code


class LedgerRestored(Exception):
    """The buffer's host was lost: the learner ends, and its next start goes on from the checkpoint. No RunError, since
    those end the run."""


class BufferClient:
    """Blocking. `identity` names the process in the buffer's log and status."""

    def __init__(self, address: Endpoint | str, *, identity: str, deadline_s: float = 30.0) -> None:
        self.address = address
        self._identity = identity
        self._deadline_s = deadline_s
        self._numbers = itertools.count(1)
        self._link: Link[zmq.Socket[bytes]] = Link(zmq.Context.instance(), zmq.DEALER, address, identity=identity)
        self._socket = self._link.socket

    def close(self) -> None:
        self._link.close()

    def hello(self, role: str) -> dict[str, Any]:
        """A new process begins. Of an actor: tickets that a process of this name held before are free again."""
        return self._ask(messages.hello(role))

    def tickets(self, actor: str, held: tuple[int, int], credits: int, leased: Held, wait_s: float) -> TicketReply:
        """At most `credits` tickets for an actor that holds weights (branch, version), after at most `wait_s`."""
        return self._ask(messages.tickets(actor, held, credits, leased, wait_s))

    def renew(self, actor: str, leases: Held) -> list[tuple[TicketId, int]]:
        """A full term for each (ticket, attempt). Gives those that were revoked: abort these episodes."""
        return self._ask(messages.renew(actor, leases))

    def put(self, trajectory: Trajectory) -> PutOutcome:
        """Returns when the trajectory is durable. late: somebody else was first; it is counted and discarded."""
        (outcome,) = self._ask(messages.put([trajectory]))
        if isinstance(outcome, messages.Error):
            raise _refused(outcome)
        return outcome

    def fail(self, id: TicketId, attempt: int, reason: str, detail: str) -> None:
        """The episode cannot be finished; it is tried again within `env.retries`."""
        self._ask(messages.fail(id, attempt, reason, detail))

    def release(self, actor: str, leases: Held, prefixes: Sequence[Row | None] = ()) -> None:
        """Tickets given back. `prefixes`: of each, what its attempt has sampled in its first turn (None: nothing is
        handed over); the next one who gets the ticket goes on behind it."""
        self._ask(messages.release(actor, leases, prefixes))

    def start(
        self, resume_batch: int, version: int, branch: int | None, fresh: bool = False, caused: bool = False
    ) -> Start:
        """A new incarnation of the learner, with weights (branch, version), that wants `resume_batch` next.

        branch: None for the initial weights. fresh: batches recorded from there on are not redone. caused: the last
        incarnation was ended on purpose, so the batch that it held is no suspect.
        """
        return self._ask(messages.start(resume_batch, version, branch, fresh, caused))

    def batch(self, incarnation: int, b: int, dp_rank: int, dp_size: int, wait_s: float) -> BatchReply:
        """This rank's share of batch b, after at most `wait_s`. The same answer however often it is asked."""
        return self._ask(messages.batch(incarnation, b, dp_rank, dp_size, wait_s))

    def finished(self, incarnation: int, b: int, outcome: Literal["applied", "guard"]) -> int:
        """Once per batch, by rank 0, before the new weights are published. Gives the version after it."""
        return self._ask(messages.finished(incarnation, b, outcome))

    def published(self, incarnation: int, branch: int, version: int, digest: str) -> None:
        """Actors can have these weights now."""
        self._ask(messages.published(incarnation, branch, version, digest))

    def checkpointed(self, incarnation: int, version: int, batch: int, path: str) -> None:
        """The learner's part lies in the folder `path`, `batch` is the one it wants next; adds `path`/buffer."""
        self._ask(messages.checkpointed(incarnation, version, batch, path))

    def evaluate(self, version: tuple[int, int], label: str) -> None:
        """Opens the evaluation set of the config, pinned to (branch, version). Idempotent per label."""
        self._ask(messages.evaluate(version, label))

    def evaluation(self, label: str) -> EvalReply:
        """How far it is; the results when it is done."""
        return self._ask(messages.evaluation(label))

    def status(self) -> dict[str, Any]:
        """Counts by state and reason, staleness histograms, leases per actor, disk bytes, counts of the service."""
        return self._ask(messages.status())

    def caused(self) -> None:
        """Before the running learner is killed on purpose: the batch that it holds is not suspected for it."""
        self._ask(messages.caused())

    def stop(self) -> None:
        """No further tickets; the buffer process ends after this answer."""
        self._ask(messages.stop())

    def _ask(self, request: Request[T]) -> T:
        n = next(self._numbers)
        frames = _frames(request, n, self._identity)
        begun = time.monotonic()
        deadline = begun + self._deadline_s + request.wait_s
        for resend_s in itertools.chain(_RESEND_S, itertools.repeat(_RESEND_S[-1])):
            now = time.monotonic()
            if now >= deadline:
                raise _timeout(request.op, self.address, now - begun)
            until = min(deadline, now + resend_s)
            if self._socket.poll(int((until - now) * 1000) + 1, zmq.POLLOUT):
                self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
            while (left := until - time.monotonic()) > 0:
                if self._socket.poll(int(left * 1000) + 1):
                    reply = [frame.buffer for frame in self._socket.recv_multipart(copy=False)]
                    header = unpack(reply[0], _MAX_REPLY_BYTES)
                    if header.get("n") == n:
                        return _decode(request, header, reply[1:])
            self._link.follow()
        raise AssertionError("unreachable: the intervals never end")


class AsyncBufferClient:
    """What an actor asks, as coroutines: any number at once, over one socket of the running event loop."""

    def __init__(self, address: Endpoint | str, *, identity: str, deadline_s: float = 30.0) -> None:
        self.address = address
        self._identity = identity
        self._deadline_s = deadline_s
        self._numbers = itertools.count(1)
        self._link = Link(zmq.asyncio.Context.instance(), zmq.DEALER, address, identity=identity)
        self._socket = self._link.socket
        self._answers: dict[int, asyncio.Future[tuple[Mapping[str, Any], list[Frame]]]] = {}
        self._unsent: deque[tuple[Trajectory, asyncio.Future[PutOutcome]]] = deque()
        self._senders: set[asyncio.Task[None]] = set()
        self._sending = 0
        """Senders that look for more before they end."""
        self._putting: set[asyncio.Future[PutOutcome]] = set()
        """What somebody waits for."""
        self._reader: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Puts that are not answered yet end as cancelled."""
        tasks = [*self._senders, *([self._reader] if self._reader is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for answer in list(self._putting):
            answer.cancel()
        self._link.close()

    async def hello(self, role: str) -> dict[str, Any]:
        return await self._ask(messages.hello(role))

    async def tickets(
        self, actor: str, held: tuple[int, int], credits: int, leased: Held, wait_s: float
    ) -> TicketReply:
        return await self._ask(messages.tickets(actor, held, credits, leased, wait_s))

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
        """Until there are none. What comes while an answer is awaited goes together in the next request."""
        while self._unsent:
            sent = [self._unsent.popleft() for _ in range(min(len(self._unsent), _PUTS_AT_ONCE))]
            outcomes = await self._outcomes([trajectory for trajectory, _ in sent])
            for (_, answer), outcome in zip(sent, outcomes, strict=True):
                if answer.done():
                    continue  # nobody waits any more
                if isinstance(outcome, Exception):
                    answer.set_exception(outcome)
                else:
                    answer.set_result(outcome)
        self._sending -= 1

    async def _outcomes(self, trajectories: Sequence[Trajectory]) -> Sequence[PutOutcome | Exception]:
        try:
            outcomes = await self._ask(messages.put(trajectories))
        except Exception as error:  # it is theirs who wait for these puts
            return [error] * len(trajectories)
        return [_refused(o) if isinstance(o, messages.Error) else o for o in outcomes]

    async def fail(self, id: TicketId, attempt: int, reason: str, detail: str) -> None:
        await self._ask(messages.fail(id, attempt, reason, detail))

    async def release(self, actor: str, leases: Held, prefixes: Sequence[Row | None] = ()) -> None:
        await self._ask(messages.release(actor, leases, prefixes))

    async def _ask(self, request: Request[T]) -> T:
        if self._reader is None:
            self._reader = asyncio.create_task(self._read(), name=f"{self._identity} buffer replies")
        n = next(self._numbers)
        frames = _frames(request, n, self._identity)
        begun = time.monotonic()
        deadline = begun + self._deadline_s + request.wait_s
        answer = self._answers[n] = asyncio.get_running_loop().create_future()
        try:
            for resend_s in itertools.chain(_RESEND_S, itertools.repeat(_RESEND_S[-1])):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                # A socket that takes nothing is the same as no answer.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._socket.send_multipart(frames, copy=False), min(left, resend_s))
                    awaited: list[asyncio.Future[Any]] = [answer, self._reader]
                    await asyncio.wait(awaited, timeout=min(left, resend_s), return_when=asyncio.FIRST_COMPLETED)
                    if answer.done():
                        header, buffers = answer.result()
                        return _decode(request, header, buffers)
                    if self._reader.done():
                        self._reader.result()  # it ends only by what it raises
                self._link.follow()
        finally:
            del self._answers[n]
        raise _timeout(request.op, self.address, time.monotonic() - begun)

    async def _read(self) -> None:
        while True:
            reply: list[Frame] = [frame.buffer for frame in await self._socket.recv_multipart(copy=False)]
            header = unpack(reply[0], _MAX_REPLY_BYTES)
            answer = self._answers.get(header.get("n", -1))
            if answer is not None and not answer.done():
                answer.set_result((header, reply[1:]))


def _frames(request: Request[Any], n: int, identity: str) -> list[Frame]:
    return [pack({"op": request.op, "n": n, "who": identity, **request.arguments}), *request.buffers]


def _decode(request: Request[T], header: Mapping[str, Any], buffers: Sequence[Frame]) -> T:
    if not header.get("ok"):
        error = header.get("error", {})
        if error.get("code") == "ledger_restored":
            raise LedgerRestored(error.get("message", ""))
        raise BufferRefused(request.op, error.get("code", "unknown"), error.get("message", "no reason given"))
    return request.decode(header, buffers)


def _refused(put: messages.Error) -> BufferRefused:
    return BufferRefused("put", put.code, put.message)


def _timeout(op: str, address: Endpoint | str, waited_s: float) -> BufferTimeout:
    return BufferTimeout(
        f"the buffer at {address} did not answer {op} within {waited_s:.1f} s: see logs/buffer.log for why."
    )
