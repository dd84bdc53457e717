"""Replies wait here for the commit that makes them true; then all of them are sent.

Nothing is dropped silently: a reply to a peer that is gone or does not read is counted, and its client asks again.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable

import zmq

from asyncrl.buffer.client import codec
from asyncrl.buffer.core import Buffer
from asyncrl.wire import Frame

log = logging.getLogger(__name__)

_REMEMBERED = 4096
_REMEMBERED_BYTES = 256 << 20
"""Replies that carry recorded turns or trajectories are large, and a peer that died never asks again."""
_TO_NO_REQUEST = codec.encode_reply(-1, None)
_COMMITTING = 0.5
"""Largest share of the time that commits may take when they come before the commit interval is over."""


class Outbox:
    def __init__(
        self,
        socket: zmq.Socket[bytes],
        buffer: Buffer,
        commit_s: float,
        clock: Callable[[], float],
        counts: Counter[str],
    ) -> None:
        self._socket = socket
        self._buffer = buffer
        self._commit_s = commit_s
        self._clock = clock
        self._counts = counts
        self.replies: list[tuple[bytes, list[Frame]]] = []
        """Peer and frames."""
        self.urgent = False
        """The next `flush` commits."""
        self.commit_seconds = 0.0
        self.on_commit: Callable[[float], None] = lambda seconds: None
        """Gets the seconds of every commit that changed the ledger."""
        self._since = 0.0
        self._rested_at = 0.0
        self._recorded: OrderedDict[bytes, tuple[int, list[Frame]]] = OrderedDict()
        """The last reply to each peer that a repeat of its request gets again, and the request's number."""
        self._recorded_bytes = 0

    def post(self, peer: bytes, frames: list[Frame]) -> None:
        if not self.replies:
            self._since = self._clock()
        self.replies.append((peer, frames))

    def record(self, peer: bytes, n: int, frames: list[Frame]) -> None:
        """A repeat of request `n` gets these frames again."""
        self._forget(peer)
        self._recorded[peer] = (n, frames)
        self._recorded_bytes += _size(frames)
        while len(self._recorded) > _REMEMBERED or (
            self._recorded_bytes > _REMEMBERED_BYTES and len(self._recorded) > 1
        ):
            self._forget(next(iter(self._recorded)))

    def _forget(self, peer: bytes) -> None:
        _, frames = self._recorded.pop(peer, (0, []))
        self._recorded_bytes -= _size(frames)

    def repeat(self, peer: bytes, n: int) -> bool:
        """Posts the recorded reply to request `n`, if there is one."""
        recorded = self._recorded.get(peer)
        if recorded is None or recorded[0] != n:
            return False
        self.post(peer, recorded[1])
        return True

    def reaches(self, peer: bytes) -> bool:
        """Whether the peer is connected and reads: sends it a reply to no request, which clients ignore."""
        try:
            self._socket.send_multipart([peer, _TO_NO_REQUEST], zmq.NOBLOCK)
        except zmq.ZMQError:
            self._counts["undelivered"] += 1
            return False
        return True

    def due_s(self) -> float:
        """Seconds until the replies should be flushed."""
        return max(0.0, min(self._since + self._commit_s, self._rested_at) - self._clock())

    def flush(self, now: float, enough: bool) -> None:
        """Commits and sends the replies: at once if urgent, when the commit interval is over, or when there are
        `enough`.

        The last only as long as commits take less than `_COMMITTING` of the time, so that many puts share one.
        """
        dirty = self._buffer.database.dirty
        due = self.urgent or now >= self._since + self._commit_s or (enough and now >= self._rested_at)
        if dirty and self.replies and not due:
            return
        self._counts["commits"] += dirty
        began = self._clock()
        self._buffer.commit(now)
        took = self._clock() - began
        self._rested_at = began + took / _COMMITTING
        self.commit_seconds += took
        if dirty:
            self.on_commit(took)
        replies, self.replies, self.urgent = self.replies, [], False
        for peer, frames in replies:
            self._send(peer, frames)

    def _send(self, peer: bytes, frames: list[Frame]) -> None:
        try:
            self._socket.send_multipart([peer, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            # The peer is gone (EHOSTUNREACH) or does not read (EAGAIN); a peer that lives asks again.
            self._counts["undelivered"] += 1
            log.info("an answer to %r could not be delivered: %s", peer, error)


def _size(frames: list[Frame]) -> int:
    return sum(memoryview(frame).nbytes for frame in frames)
