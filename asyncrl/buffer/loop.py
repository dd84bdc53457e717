"""The buffer process's loop.

    actors ──tickets, put, renew, fail──┐                    ┌──> tickets, "stored"
                                        v                    │
    learner ──batch, finished ...──> ROUTER ──> handler ──> outbox ──> trajectories of batch b, versions
                                        ^          │         │
                                        │       held.py      └── replies leave after the commit that holds them
                                        └── requests.py: one handler per request; it asks core.py

takes      one request at a time; each may be a repeat
gives      one reply per request; tickets and batch are held until there is an answer or their wait_s is over
unblocks   a held `tickets`: a batch taken, weights published, a lease lapsed, a group dropped
           a held `batch`:   a put that completes a group, `finished` of the batch before it
ends       after the last commit and its replies on SIGTERM or `stop`; at once when the disk refuses a write
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from asyncrl.buffer.client import codec, messages
from asyncrl.buffer.core import Buffer
from asyncrl.buffer.record import MAX_FRAME_BYTES
from asyncrl.buffer.requests.handlers import Answer, Handler, Requests
from asyncrl.buffer.requests.held import HeldRequest, HeldRequests
from asyncrl.buffer.requests.outbox import Outbox
from asyncrl.buffer.rules import Refused
from asyncrl.sockets import Endpoint, Listener
from asyncrl.wire import Frame, WireError

log = logging.getLogger(__name__)

_AT_ONCE = 4
"""Most requests handled between two looks at the clock, and the number of replies that triggers a commit. With more,
the clients and the buffer would wait for each other in turn instead of working at the same time."""
_TICK_S = 0.25
"""Seconds between two calls of `Buffer.tick`; the wait for a message while nothing is held and no reply is due."""


class Service:
    """`clock` is monotonic, in seconds."""

    def __init__(
        self,
        buffer: Buffer,
        address: Endpoint | str,
        commit_s: float,
        clock: Callable[[], float] = time.monotonic,
        checkpoints: Path | None = None,
    ) -> None:
        """`checkpoints`: the only folder under which clients may request checkpoints; None: nowhere."""
        self._buffer = buffer
        self._clock = clock
        self._listener = Listener(zmq.ROUTER, address, MAX_FRAME_BYTES, {zmq.ROUTER_MANDATORY: 1, zmq.LINGER: 2000})
        self._socket = self._listener.socket
        self.counts: Counter[str] = Counter()
        """Totals since this process began, by name: refused, undelivered, puts, duplicate, late, env_failures, commits;
        `held` is the number of requests held now."""
        self._requests = Requests(buffer, self.counts, clock, checkpoints)
        self.outbox = Outbox(self._socket, buffer, commit_s, clock, self.counts)
        self._held = HeldRequests(self.outbox.reaches)
        self._stop = False

    def stop(self) -> None:
        """Ends the loop after its next commit. Safe in a signal handler."""
        self._stop = True

    def run(self, every_s: float, report: Callable[[], None]) -> None:
        """Serves until `stop`; calls `report` every `every_s`. Raises LedgerFailed when the disk refuses a write."""
        next_report = next_tick = self._clock()
        while not (self._stop or self._buffer.stopping):
            handled = self._receive()
            now = self._clock()
            if now >= next_tick:
                self._buffer.tick(now, late=now - next_tick)
                next_tick = now + _TICK_S
            if self._held and (handled or now >= self._held.retry_at):
                self._answer_held(now)
            self.outbox.flush(now, enough=not handled or len(self.outbox.replies) >= _AT_ONCE)
            if now >= next_report:
                next_report = now + every_s
                report()
        self._buffer.stop()
        self._answer_held(float("inf"))
        self.outbox.urgent = True
        self.outbox.flush(float("inf"), enough=True)  # under `fsync: interval` to the disk as well

    def close(self) -> None:
        """Closes the socket after sending the last replies, for at most two seconds."""
        self._listener.close()

    def _receive(self) -> int:
        """Handles up to `_AT_ONCE` messages, waiting for the first until other work is due; returns how many."""
        wait_s = _TICK_S
        if self.outbox.replies:
            wait_s = self.outbox.due_s()
        elif self._held:
            wait_s = max(0.0, self._held.retry_at - self._clock())
        count = 0
        while count < _AT_ONCE:
            try:
                frames = self._listener.receive(1 + self._buffer.limits.frames)
            except zmq.Again:
                # In milliseconds, rounded up: a short wait is not 0.
                if count or not self._socket.poll(int(wait_s * 1000 + 0.999)):
                    break
                continue
            self._handle(frames[0].bytes, [frame.buffer for frame in frames[1:]])
            count += 1
        return count

    def _handle(self, peer: bytes, message: Sequence[Frame]) -> None:
        n = -1
        try:
            request = self._buffer.limits.decode(message)
            n = request.n
            if not self.outbox.repeat(peer, n):
                self._answer(peer, request, message[1:])
        except WireError as error:
            if n < 0 and message:
                n = codec.number_of(message[0])
            self.counts["refused"] += 1
            log.warning("refused a message of %r: %s", peer, error)
            self._refuse(peer, n, Refused("malformed", str(error)))
        except Refused as error:
            self._refuse(peer, n, error)

    def _answer(self, peer: bytes, request: messages.Request[Any], frames: Sequence[Frame]) -> None:
        """Answers a request, or holds it: then it is answered with the others that wait."""
        handler = self._requests.handlers[type(request)]
        handler.check(request)
        if handler.may_wait is not None:
            now = self._clock()
            self._held.add(HeldRequest(peer, request, handler, now + handler.may_wait(request), now))
        # True: it must be answered now; a handler without `may_wait` never returns None.
        elif (answer := handler.answer(request, frames, True)) is not None:
            self._reply(peer, request.n, handler, answer)

    def _answer_held(self, now: float) -> None:
        for held, answer in self._held.answered(now):
            if isinstance(answer, Refused):
                self._refuse(held.peer, held.request.n, answer)
            else:
                self._reply(held.peer, held.request.n, held.handler, answer)
        self.counts["held"] = len(self._held)

    def _reply(self, peer: bytes, n: int, handler: Handler[Any], answer: Answer) -> None:
        frames = [codec.encode_reply(n, answer.reply), *answer.frames]
        self.outbox.post(peer, frames)
        self.outbox.urgent |= handler.urgent
        if handler.once:
            self.outbox.record(peer, n, frames)

    def _refuse(self, peer: bytes, n: int, error: Refused) -> None:
        self.outbox.post(peer, [codec.encode_refusal(n, error.code, str(error))])
