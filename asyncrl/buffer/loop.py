"""The buffer process's loop.

        actors ──tickets, put, renew, fail──┐              ┌──> tickets, "stored"
                                            v              │
        learner ──batch, finished ...──> ROUTER ──> core ──┴──> trajectories of batch b, versions
                                            ^        │
                                            │        └──> commit: segment, then ledger (every `buffer.commit_ms`)
                                            └── answers leave only after the commit that holds them

    takes      one request at a time; each may be a repeat
    gives      one answer per request; tickets and batch are held until there is one or their wait_s is over
    unblocks   a held `tickets`: a batch taken, weights published, a lease lapsed, a group dropped
               a held `batch`:   a put that completes a group, `finished` of the batch before it
    ends       on SIGTERM or `stop`, after the last commit and its answers; on a disk that refuses a write, at once

Nothing is dropped silently: an answer to a peer that is gone or does not read is counted, and its client asks again.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq

from asyncrl.buffer.client.messages import integer, text
from asyncrl.buffer.core import Buffer
from asyncrl.buffer.requests import Answers, Header
from asyncrl.buffer.rules import Refused
from asyncrl.sockets import Endpoint, Listener
from asyncrl.wire import Frame, WireError, pack, unpack

log = logging.getLogger(__name__)

_MAX_FRAME_BYTES = 256 << 20
_MAX_HELD = 16384
_MAX_HELD_OF_ONE = 64
_REMEMBERED = 4096
_AT_ONCE = 4
"""Requests handled between two looks at the clock, and answers that are worth a commit: with more of them, those who
wait for an answer and the buffer would work in turns, not at once."""
_RETRY_HELD_S = 0.05
_RETRY_WRITING_S = 0.005
_HELD = ("tickets", "batch", "checkpointed")
"""Requests that may have to wait for their answer."""
_IDLE_S = 0.25
_COMMITTING = 0.5


@dataclass(slots=True)
class _Held:
    peer: bytes
    n: int
    header: Header
    until: float


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
        """`checkpoints`: the one folder below which a client may have a checkpoint written; None: nowhere."""
        self._buffer = buffer
        self._commit_s = commit_s
        self._clock = clock
        self._listener = Listener(zmq.ROUTER, address, _MAX_FRAME_BYTES, {zmq.ROUTER_MANDATORY: 1, zmq.LINGER: 2000})
        self._socket = self._listener.socket
        self._held: OrderedDict[tuple[bytes, int], _Held] = OrderedDict()
        self._waiting: Counter[bytes] = Counter()
        """How many of them are of each peer."""
        self._retry_at = 0.0
        self._outbox: list[tuple[bytes, list[Frame]]] = []
        self._outbox_since = 0.0
        self._urgent = False
        self._rested_at = 0.0
        self._answered: OrderedDict[bytes, tuple[int, list[Frame]]] = OrderedDict()
        """The last answer with tickets, or with an incarnation, to each peer: a repeat gets it again, not another."""
        self.counts: Counter[str] = Counter()
        """refused, undelivered, puts, duplicate, late, env_failures, commits: since this process began. held: now."""
        self.commit_seconds = 0.0
        self._stop = False
        self._answers = Answers(buffer, self.counts, clock, checkpoints)

    def stop(self) -> None:
        """From a signal handler: the loop ends after its next commit."""
        self._stop = True

    def run(self, every_s: float, report: Callable[[], None]) -> None:
        """Serves until `stop`; calls `report` every `every_s`. Raises LedgerFailed when the disk refuses a write."""
        next_report = next_tick = self._clock()
        while not (self._stop or self._buffer.stopping):
            handled = self._receive()
            now = self._clock()
            if now >= next_tick:
                next_tick = now + _IDLE_S
                self._buffer.tick(now)
            if self._held and (handled or now >= self._retry_at):
                self._answer_held(now)
            self._flush(now, enough=not handled or len(self._outbox) >= _AT_ONCE)
            if now >= next_report:
                next_report = now + every_s
                report()
        self._buffer.stop()
        self._answer_held(float("inf"))
        self._urgent = True
        self._flush(float("inf"), enough=True)  # under `fsync: interval` to the disk, too: there is no later time

    def close(self) -> None:
        """Hands over the last answers, for at most two seconds."""
        self._listener.close()

    # Messages

    def _receive(self) -> int:
        """Handles what is there, at most `_AT_ONCE` messages; waits for the first while nothing else is due."""
        wait_s = _IDLE_S
        if self._outbox:
            wait_s = max(0.0, min(self._outbox_since + self._commit_s, self._rested_at) - self._clock())
        elif self._held:
            wait_s = max(0.0, self._retry_at - self._clock())
        count = 0
        while count < _AT_ONCE:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                if count or not self._socket.poll(int(wait_s * 1000 + 0.999)):
                    break
                continue
            self._handle([frames[0].bytes, *(frame.buffer for frame in frames[1:])])
            count += 1
        return count

    def _handle(self, frames: Sequence[Frame]) -> None:
        peer, n = bytes(frames[0]), -1
        try:
            if len(frames) < 2:
                raise WireError("a request has a header frame, got none")
            header = unpack(frames[1])
            n = integer(header, "n")
            op = text(header, "op", 64)
            if peer in self._answered and self._answered[peer][0] == n:
                self._post(peer, self._answered[peer][1])
            elif op in _HELD:
                self._hold(peer, n, header)
            elif op in self._answers.ops:
                fields, buffers = self._answers.ops[op](header, frames[2:])
                self._urgent |= op not in ("put", "renew")
                self._reply(peer, n, fields, buffers)
                if op == "start":
                    self._remember(peer, n)
            else:
                raise WireError(f"op is {op!r}, expected one of {', '.join((*_HELD, *self._answers.ops))}")
        except WireError as error:
            self.counts["refused"] += 1
            log.warning("refused a message of %r: %s", peer, error)
            self._refuse(peer, n, "malformed", str(error))
        except Refused as error:
            self._refuse(peer, n, error.code, str(error))

    def _hold(self, peer: bytes, n: int, header: Header) -> None:
        """Checks a request that may have to wait; it is answered with the others that wait."""
        wait_s = self._answers.admit(header)
        if (peer, n) not in self._held:
            if len(self._held) >= _MAX_HELD or self._waiting[peer] >= _MAX_HELD_OF_ONE:
                held = f"{len(self._held)} requests are waiting, {self._waiting[peer]} of them of this peer"
                raise Refused("busy", held)
            self._waiting[peer] += 1
            self._held[peer, n] = _Held(peer, n, header, self._clock() + wait_s)

    def _answer_held(self, now: float) -> None:
        writing = any(request.header["op"] == "checkpointed" for request in self._held.values())
        self._retry_at = now + (_RETRY_WRITING_S if writing else _RETRY_HELD_S)
        in_vain: set[tuple[int, ...]] = set()
        for key, request in list(self._held.items()):
            last_chance, header = now >= request.until, request.header
            try:
                if header["op"] == "batch":
                    answer = self._answers.batch(header, last_chance)
                elif header["op"] == "checkpointed":
                    answer = self._answers.checkpointed(header, last_chance)
                elif tuple(header["held"]) in in_vain and not last_chance:
                    continue  # somebody with the same weights got nothing just now
                else:
                    answer = self._answers.tickets(header, last_chance)
            except Refused as error:
                self._no_longer_held(key)
                self._refuse(request.peer, request.n, error.code, str(error))
                continue
            if answer is None:
                if header["op"] == "tickets":
                    in_vain.add(tuple(header["held"]))
                continue
            self._no_longer_held(key)
            self._reply(request.peer, request.n, *answer)
            if header["op"] == "tickets":
                self._remember(request.peer, request.n)
            else:
                self._urgent = True
        self.counts["held"] = len(self._held)

    def _no_longer_held(self, key: tuple[bytes, int]) -> None:
        del self._held[key]
        self._waiting[key[0]] -= 1
        if not self._waiting[key[0]]:
            del self._waiting[key[0]]

    # Answers

    def _reply(self, peer: bytes, n: int, fields: Header, buffers: Sequence[Frame]) -> None:
        self._post(peer, [pack({"n": n, "ok": True, **fields}), *buffers])

    def _refuse(self, peer: bytes, n: int, code: str, message: str) -> None:
        self._post(peer, [pack({"n": n, "ok": False, "error": {"code": code, "message": message}})])

    def _remember(self, peer: bytes, n: int) -> None:
        """The answer just given, for a repeat of its request."""
        self._answered[peer] = (n, self._outbox[-1][1])
        self._answered.move_to_end(peer)
        if len(self._answered) > _REMEMBERED:
            self._answered.popitem(last=False)

    def _post(self, peer: bytes, frames: list[Frame]) -> None:
        if not self._outbox:
            self._outbox_since = self._clock()
        self._outbox.append((peer, frames))

    def _flush(self, now: float, enough: bool) -> None:
        """Commits and lets the answers go: at once, when the commit interval is over, or when there are `enough`.

        The last only as long as commits take less than `_COMMITTING` of the time, so that many puts share one.
        """
        database = self._buffer.database
        due = self._urgent or now >= self._outbox_since + self._commit_s or (enough and now >= self._rested_at)
        if database.dirty and self._outbox and not due:
            return
        begun = self._clock()
        if database.dirty:
            self.counts["commits"] += 1
        self._buffer.commit(now)
        took = self._clock() - begun
        self._rested_at = begun + took / _COMMITTING
        self.commit_seconds += took
        outbox, self._outbox, self._urgent = self._outbox, [], False
        for peer, frames in outbox:
            try:
                self._socket.send_multipart([peer, *frames], zmq.NOBLOCK, copy=False)
            except zmq.ZMQError as error:
                # Gone (EHOSTUNREACH) or not reading (EAGAIN); whoever lives asks again.
                self.counts["undelivered"] += 1
                log.info("an answer to %r could not be delivered: %s", peer, error)
