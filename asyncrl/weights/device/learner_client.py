"""An actor's requests to the learner, one after another, each with a deadline."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import zmq

from asyncrl.sockets import Endpoint, Link
from asyncrl.weights.protocol import WeightsCorrupt
from asyncrl.wire import WireError, pack, unpack

ANSWER_S = 5.0
LOOK_MS = 50
MAX_LAYOUT_BYTES = 64 << 20


class LearnerClient:
    """Sends requests to the learner, one after another."""

    def __init__(self, server: Endpoint | str, reader: str, answer_s: float = ANSWER_S) -> None:
        self._link: Link[zmq.Socket[bytes]] = Link(zmq.Context.instance(), zmq.DEALER, server, identity=reader)
        self._reader, self._answer_s = reader, answer_s
        self._numbers = itertools.count(1)
        self._lock, self._closing = threading.Lock(), threading.Event()

    def ask(self, op: str, patience_s: float = 0.0, **fields: Any) -> tuple[dict[str, Any], bytes]:
        """The answer's header and its second frame. Raises WeightsCorrupt if it is refused or not answered in time."""
        with self._lock:
            n = next(self._numbers)
            try:
                self._link.socket.send(pack({"op": op, "n": n, "reader": self._reader, **fields}), zmq.NOBLOCK)
            except zmq.Again:
                self._link.follow()
                raise WeightsCorrupt(f"the learner is not there ({self._link}): {op} cannot be sent") from None
            deadline = time.monotonic() + patience_s + self._answer_s
            while time.monotonic() < deadline and not self._closing.is_set():
                if not self._link.socket.poll(LOOK_MS):
                    continue
                frames = self._link.socket.recv_multipart()
                if len(frames) != 2 or len(frames[1]) > MAX_LAYOUT_BYTES:
                    continue
                try:
                    header = unpack(frames[0])
                except WireError as error:
                    raise WeightsCorrupt(f"the learner's answer to {op}: {error}") from error
                if header.get("n") != n:
                    continue  # the answer to an abandoned request
                if not header.get("ok"):
                    raise WeightsCorrupt(f"the learner refused {op}: {header.get('message')}")
                return header, frames[1]
            self._link.follow()
            raise WeightsCorrupt(f"the learner did not answer {op} within {patience_s + self._answer_s:g} s")

    def end(self) -> None:
        """Abandon a request that waits for its answer."""
        self._closing.set()

    def close(self) -> None:
        self.end()
        with self._lock:
            self._link.close()
