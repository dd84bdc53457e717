"""A mirror's client of a WeightsServer (server.py): asks what is new there and fetches its bytes, chunk by chunk."""

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
from asyncrl.weights.requests import NO_VERSION
from asyncrl.wire import WireError, pack, unpack

CHUNK_BYTES = 1 << 20
AT_ONCE = 8
"""Chunks requested at the same time."""
WAIT_S = 2.0
"""How long the server may hold a request for a newer version."""
JOIN_WAIT_S = 1.0
LOOK_MS = 100
Into = Callable[[int, memoryview], None]


class Gone(Exception):
    """The version being fetched is no longer offered."""


class Silent(Exception):
    """There was no reply in time."""


class Stopped(Exception):
    """The mirror is closing."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What to fetch next."""

    name: str
    id: WeightsVersion
    size: int
    base: str
    """Digest of the version that the delta applies to; empty: it is the whole file."""
    sum: str
    """Digest of the bytes of a delta."""


class Source:
    """For one thread. Every method raises Stopped soon after `stop` is set, and WireError for a malformed reply."""

    def __init__(
        self, where: Endpoint | str, answer_s: float, stop: threading.Event, counts: Counter[str], *, patient: bool
    ) -> None:
        """`answer_s`: a request without a reply for so long is lost. `counts`: see Mirror. `patient`: lost requests for
        chunks are sent again, to the address that the server has by then."""
        self._link: Link[zmq.Socket[bytes]] = Link(zmq.Context.instance(), zmq.DEALER, where, identity="mirror")
        self._answer_s, self._stop, self._counts, self._patient = answer_s, stop, counts, patient
        self._numbers = itertools.count(1)

    def close(self) -> None:
        self._link.close()

    def latest(
        self, held: WeightsVersion | None, kept: WeightsVersion | None, full: bool
    ) -> tuple[Offer | None, Offer | None]:
        """The version after `held`, or None; never as a delta if `full`. And the pinned version, in full, or None; a
        reply comes at once if it is not `kept`. Raises Silent."""
        request = {"op": "latest", "held": _named(held), "kept": _named(kept), "full": full, "wait_s": WAIT_S}
        if (header := self._request(request, WAIT_S + self._answer_s)) is None:
            self._counts["again"] += 1
            self._link.follow()
            raise Silent
        return _offers(header)

    def join(self, relay: str, lost: str) -> tuple[str, list[Any]] | None:
        """The host to fetch from (empty: this server) and the newest version here; None without a reply.

        `relay` is the address at which this host serves others; `lost` is the host that did not answer it.
        """
        header = self._request({"op": "join", "relay": relay, "lost": lost}, min(JOIN_WAIT_S, self._answer_s))
        if header is None:
            return None
        if not header.get("ok") or type(header.get("parent")) is not str:
            raise WireError(f"the weights server refused: {header.get('message')}")
        return header["parent"], header.get("newest") or []

    def fetch(self, offer: Offer, into: Into) -> None:
        """Fetch every chunk once, in any order. Raises Gone and, unless it is patient, Silent."""
        missing = deque(range(0, offer.size, CHUNK_BYTES))
        asked: dict[int, float] = {}  # deadlines of the requested chunks, by offset
        while missing or asked:
            for offset in [missing.popleft() for _ in range(min(len(missing), AT_ONCE - len(asked)))]:
                self._send({"op": "chunk", "payload": offer.name, "offset": offset, "length": CHUNK_BYTES})
                asked[offset] = time.monotonic() + self._answer_s
            missing.extend(self._receive(offer, asked, into))
            missing.extendleft(reversed(self._late(asked)))

    def _receive(self, offer: Offer, asked: dict[int, float], into: Into) -> list[int]:
        """Take the chunks that have arrived out of `asked` and pass them on; returns those to request again."""
        bad = []
        for header, data in self._replies():
            if not header.get("ok") and header.get("code") == "gone":
                raise Gone
            offset = header.get("offset", -1)
            if header.get("payload") != offer.name or offset not in asked:
                continue  # a late reply to an earlier request
            del asked[offset]
            expected = min(CHUNK_BYTES, offer.size - offset)
            if len(data) != expected or xxhash.xxh3_64_intdigest(data) != header.get("sum"):
                self._counts["bad_chunks"] += 1
                bad.append(offset)
                continue
            into(offset, data)
            self._counts["received_bytes"] += expected
        return bad

    def _late(self, asked: dict[int, float]) -> list[int]:
        """Take the chunks that were not sent in time out of `asked`. Raises Silent unless it is patient."""
        now = time.monotonic()
        late = [offset for offset, deadline in asked.items() if now > deadline]
        if late:
            self._counts["again"] += len(late)
            if not self._patient:
                raise Silent
            self._link.follow()
        for offset in late:
            del asked[offset]
        return late

    def _request(self, request: Mapping[str, Any], patience_s: float) -> dict[str, Any] | None:
        n = self._send(request)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            for header, _ in self._replies():
                if header.get("n") == n:
                    return header
        return None

    def _send(self, request: Mapping[str, Any]) -> int:
        n = next(self._numbers)
        with contextlib.suppress(zmq.Again):  # the server is away: sent again after `answer_s`
            self._link.socket.send(pack({"n": n, **request}), zmq.NOBLOCK)
        return n

    def _replies(self) -> Iterator[tuple[dict[str, Any], memoryview]]:
        """Yields the replies that have arrived, after at most `LOOK_MS`."""
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


def _named(held: WeightsVersion | None) -> list[Any]:
    id = held or NO_VERSION
    return [id.branch, id.version, id.digest]


def _offers(header: Mapping[str, Any]) -> tuple[Offer | None, Offer | None]:
    """The newest and the pinned version in a reply to `latest`. Raises WireError."""
    if not header.get("ok"):
        raise WireError(f"the weights server refused: {header.get('message')}")
    pinned = header.get("pinned")
    if not isinstance(pinned, dict):
        raise WireError(f"the weights server says {pinned!r} of a pinned version")
    return _offer(header), _offer(pinned) if pinned else None


def _offer(header: Mapping[str, Any]) -> Offer | None:
    """The offer in a reply; None if there is nothing new. Raises WireError."""
    if header.get("payload") == "":
        return None
    id, texts, size = header.get("id"), [header.get(k) for k in ("payload", "base", "sum")], header.get("bytes")
    if not isinstance(id, list) or [type(x) for x in id] != [int, int, str] or any(type(t) is not str for t in texts):
        raise WireError("the weights server offers a version without a name")
    if type(size) is not int or not TRAILER.size < size < 2**50:
        raise WireError(f"the weights server offers {size!r} bytes")
    return Offer(str(texts[0]), WeightsVersion(*id), size, str(texts[1]), str(texts[2]))
