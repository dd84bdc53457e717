"""Who a mirror (mirror.py) fetches from, a Server (server.py): what is new there, and its bytes, chunk by chunk."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash
import zmq

from asyncrl.sockets import Endpoint, Link
from asyncrl.weights.local.file import TRAILER
from asyncrl.weights.protocol import WeightsVersion
from asyncrl.wire import WireError, pack, unpack

CHUNK_BYTES = 1 << 20
AT_ONCE = 8
"""Chunks asked for and not yet there."""
WAIT_S = 2.0
"""How long the server may hold a request for what is new."""
JOIN_WAIT_S = 1.0
LOOK_MS = 100
Into = Callable[[int, memoryview], None]


class Gone(Exception):
    """What is being fetched is no longer offered."""


class Silent(Exception):
    """No answer in time."""


class Stopped(Exception):
    pass


@dataclass(frozen=True, slots=True)
class Offer:
    """The next thing to fetch."""

    name: str
    id: WeightsVersion
    size: int
    base: str
    """Digest of the version that it is a delta against; empty: it is the whole file."""
    sum: str
    """Of a delta's bytes."""


class Source:
    """For one thread. Every method raises Stopped soon after `stop` is set, and WireError for what makes no sense."""

    def __init__(
        self, where: Endpoint | str, answer_s: float, stop: threading.Event, counts: Counter[str], *, patient: bool
    ) -> None:
        """`answer_s`: without an answer for so long a request is lost. `counts`: see Mirror. `patient`: what is being
        fetched is asked for again after silence, of where the server is by then."""
        self._link: Link[zmq.Socket[bytes]] = Link(zmq.Context.instance(), zmq.DEALER, where, identity="mirror")
        self._answer_s, self._stop, self._counts, self._patient = answer_s, stop, counts, patient
        self._numbers = itertools.count(1)

    def close(self) -> None:
        self._link.close()

    def latest(self, held: WeightsVersion | None, full: bool) -> Offer | None:
        """None: nothing is newer than `held`. `full`: no delta. Raises Silent."""
        says = [held.branch, held.version, held.digest] if held else [-1, -1, ""]
        request = {"op": "latest", "held": says, "full": full, "wait_s": WAIT_S}
        if (header := self._answer(request, WAIT_S + self._answer_s)) is None:
            self._counts["again"] += 1
            self._link.follow()
            raise Silent
        return _offer(header)

    def join(self, relay: str, lost: str) -> tuple[str, list[Any]] | None:
        """From whom to fetch, empty for this one, and what is newest here; None without an answer. `relay`: where this
        host hands on; `lost`: from whom it heard nothing."""
        header = self._answer({"op": "join", "relay": relay, "lost": lost}, min(JOIN_WAIT_S, self._answer_s))
        if header is None:
            return None
        if not header.get("ok") or type(header.get("parent")) is not str:
            raise WireError(f"the weights server refused: {header.get('message')}")
        return header["parent"], header.get("newest") or []

    def fetch(self, offer: Offer, into: Into) -> None:
        """Every chunk once, in any order. Raises Gone and, unless it is patient, Silent."""
        missing = deque(range(0, offer.size, CHUNK_BYTES))
        asked: dict[int, float] = {}
        while missing or asked:
            while missing and len(asked) < AT_ONCE:
                offset = missing.popleft()
                self._ask({"op": "chunk", "payload": offer.name, "offset": offset, "length": CHUNK_BYTES})
                asked[offset] = time.monotonic() + self._answer_s
            for header, data in self._answers():
                if not header.get("ok") and header.get("code") == "gone":
                    raise Gone
                offset = header.get("offset", -1)
                if header.get("payload") != offer.name or offset not in asked:
                    continue  # of something fetched before, or a second answer
                del asked[offset]
                expected = min(CHUNK_BYTES, offer.size - offset)
                if len(data) != expected or xxhash.xxh3_64_intdigest(data) != header.get("sum"):
                    self._counts["bad_chunks"] += 1
                    missing.append(offset)
                    continue
                into(offset, data)
                self._counts["received_bytes"] += expected
            now = time.monotonic()
            if late := [offset for offset, until in asked.items() if now > until]:
                self._counts["again"] += len(late)
                if not self._patient:
                    raise Silent
                self._link.follow()
                for offset in late:
                    del asked[offset]
                missing.extendleft(reversed(late))

    def _answer(self, request: Mapping[str, Any], patience_s: float) -> dict[str, Any] | None:
        n = self._ask(request)
        until = time.monotonic() + patience_s
        while time.monotonic() < until:
            for header, _ in self._answers():
                if header.get("n") == n:
                    return header
        return None

    def _ask(self, request: Mapping[str, Any]) -> int:
        n = next(self._numbers)
        with contextlib.suppress(zmq.Again):  # nobody is there: asked again after `answer_s`
            self._link.socket.send(pack({"n": n, **request}), zmq.NOBLOCK)
        return n

    def _answers(self) -> Iterator[tuple[dict[str, Any], memoryview]]:
        """What is there, after at most `LOOK_MS`."""
        if self._stop.is_set():
            raise Stopped
        if not self._link.socket.poll(LOOK_MS):
            return
        for _ in range(AT_ONCE):
            try:
                frames = self._link.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if len(frames) == 2:
                yield unpack(frames[0].buffer), frames[1].buffer


def _offer(header: Mapping[str, Any]) -> Offer | None:
    """None: there is nothing new. Raises WireError."""
    if not header.get("ok"):
        raise WireError(f"the weights server refused: {header.get('message')}")
    if header.get("payload") == "":
        return None
    id, texts, size = header.get("id"), [header.get(k) for k in ("payload", "base", "sum")], header.get("bytes")
    if not isinstance(id, list) or [type(x) for x in id] != [int, int, str] or any(type(t) is not str for t in texts):
        raise WireError("the weights server offers a version without a name")
    if type(size) is not int or not TRAILER.size < size < 2**50:
        raise WireError(f"the weights server offers {size!r} bytes")
    return Offer(str(texts[0]), WeightsVersion(*id), size, str(texts[1]), str(texts[2]))
