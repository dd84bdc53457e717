"""Serves the versions of one folder to other hosts.

    learner ──> folder (shared memory) ──> WeightsServer ──chunks──> Mirror ──> folder of that host ──> its actors
                                             one per run      one per host

    takes      `latest`: is there a version after the one that I hold; `chunk`: these bytes of it; `join`: I serve it at
               this address, whom do I fetch from (fanout.py)
    gives      the name and size of what to fetch next, a delta or the full file, and of what is pinned for an
               evaluation, always the full file; and their bytes
    unblocks   a held `latest`: a publication, a change of the pinned version, or the end of its wait_s

It reads the learner's files in shared memory, so that the last version stays available while the learner is down. A
mirror requests each chunk and checks everything: the server keeps no state about it.

A new version is offered once its delta is ready. A thread makes that (changes.py), while the version before is still
served.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
import zmq

from asyncrl.sockets import Endpoint, Listener
from asyncrl.weights.local.folder import File, Watch
from asyncrl.weights.network.changes import Changes, Delta, PendingDelta
from asyncrl.weights.network.fanout import Fanout
from asyncrl.weights.protocol import WeightsCorrupt, WeightsVersion
from asyncrl.weights.requests import MAX_HELD, NO_VERSION, HeldLatest, held_latest, number
from asyncrl.wire import Frame, WireError, pack, unpack

log = logging.getLogger(__name__)

MAX_CHUNK_BYTES = 4 << 20
MAX_REQUEST_BYTES = 64 << 10
CHAIN = 4
"""Number of deltas kept; a mirror that is further behind fetches the full file."""
WORTH = 0.25
"""Largest delta, as a share of the file; so all deltas kept are at most as large as one file."""
IDLE_S = 10.0
"""An old version is kept while chunks of it were fetched within so many seconds."""
FORGET_S = 20.0
"""A host that has not asked whom to fetch from for so long is removed from the fan-out."""
AGAIN_S = 1.0
"""A damaged file is read again after so many seconds: its publisher may have rewritten it."""
LOOK_MS = 20


@dataclass(slots=True)
class _Payload:
    """A delta or a full file that can be fetched."""

    name: str
    id: WeightsVersion
    data: Any
    base: str = ""
    """Digest of the version that the delta applies to; empty: the full file."""
    sum: str = ""
    """Digest of the bytes of a delta; a full file has digests inside."""
    file: File | None = None
    asked: float = 0.0


class WeightsServer:
    """`clock` is monotonic, in seconds."""

    def __init__(
        self,
        folder: Path,
        where: Endpoint | str,
        full_every: int,
        fanout: int = 0,
        relays: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`relays`: this host serves what it fetched itself (relay.py). It reads the folder from the first request on,
        and offers no version older than the one held: a mirror may be ahead of it."""
        self._watch = Watch(folder)
        self._full_every, self._clock = full_every, clock
        self._listener = Listener(zmq.ROUTER, where, MAX_REQUEST_BYTES, {})
        self._socket = self._listener.socket
        self._current: _Payload | None = None
        self._pinned: _Payload | None = None
        self._previous: list[_Payload] = []
        self._deltas: deque[_Payload] = deque(maxlen=CHAIN)
        self._seen: WeightsVersion | None = None
        self._since_full = 0
        self._changes = Changes()
        self._pending: PendingDelta | None = None
        self._told, self._look_at = "", -math.inf
        self._relays = self._idle = relays
        self.fanout = Fanout(fanout, FORGET_S)
        self._held: dict[bytes, HeldLatest] = {}
        self.counts: Counter[str] = Counter()
        """chunks, sent_bytes, refused, gone, full (offered), delta (offered), since this process started."""
        self.delta_bytes = 0
        """Size of the delta to the latest version; 0: there was none."""

    @property
    def latest(self) -> WeightsVersion | None:
        """The version that it serves."""
        return self._current.id if self._current is not None else None

    def run(self, stop: Callable[[], bool], every_s: float, report: Callable[[], None]) -> None:
        next_report = self._clock()
        while not stop():
            self.turn()
            if self._clock() >= next_report:
                next_report = self._clock() + every_s
                report()

    def turn(self) -> None:
        """Wait at most `LOOK_MS` for requests, answer them, and check for a new version."""
        if self._socket.poll(LOOK_MS):
            self._answer_waiting()
        self._look()
        now = self._clock()
        for peer, request in list(self._held.items()):
            offer = self._offer(request)
            if offer is not None or self._pin_differs(request) or now >= request.until:
                del self._held[peer]
                pinned = _described(self._pinned) if self._pinned is not None else {}
                self._send(peer, request.n, {"ok": True, **_described(offer), "pinned": pinned})

    def _answer_waiting(self) -> None:
        for _ in range(64):
            try:
                frames = [bytes(frame.buffer) for frame in self._listener.receive(2)]
            except zmq.Again:
                return
            self._handle(frames)

    def close(self) -> None:
        self._changes.close()
        if self._pending is not None:
            self._pending.file.close()
        for payload in (self._current, self._pinned, *self._previous):
            if payload is not None and payload.file is not None:
                payload.file.close()
        self._listener.close()

    def _handle(self, frames: Sequence[bytes]) -> None:
        peer = frames[0]
        header: dict[str, Any] = {}
        try:
            if len(frames) != 2:
                raise WireError(f"a request has one frame, got {len(frames) - 1}")
            header = unpack(frames[1])
            if header.get("op") == "chunk":
                self._chunk(peer, header)
            elif header.get("op") == "latest":
                held = held_latest(header, self._clock())
                self._idle = False
                if len(self._held) >= MAX_HELD and peer not in self._held:
                    raise WireError(f"{MAX_HELD} requests are waiting already")
                self._held[peer] = held
            elif header.get("op") == "join":
                self._join(peer, header)
            else:
                raise WireError(f"op is {header.get('op')!r:.99}; expected one of latest, chunk, join")
        except WireError as error:
            self.counts["refused"] += 1
            log.debug("refused a request: %s", error)
            self._send(peer, number(header), {"ok": False, "code": "malformed", "message": str(error)})

    def _chunk(self, peer: bytes, header: Mapping[str, Any]) -> None:
        name, offset, length = header.get("payload"), header.get("offset"), header.get("length")
        if type(name) is not str or type(offset) is not int or type(length) is not int:
            raise WireError("a chunk has a payload, an offset and a length")
        there = (self._current, *self._deltas, *self._previous, self._pinned)
        payload = next((p for p in there if p and p.name == name), None)
        if payload is None:
            self.counts["gone"] += 1
            self._send(
                peer, number(header), {"ok": False, "code": "gone", "message": f"{name[:200]} is no longer here"}
            )
            return
        if not 0 <= offset < len(payload.data) or not 0 < length <= MAX_CHUNK_BYTES:
            raise WireError(f"no {length} bytes at {offset} of {len(payload.data)}")
        payload.asked = self._clock()
        data = memoryview(payload.data)[offset : offset + length]
        self.counts["chunks"] += 1
        self.counts["sent_bytes"] += len(data)
        # Not copied: if the version is replaced before it is sent, the checksum shows it.
        fields = {"ok": True, "payload": name, "offset": offset, "sum": xxhash.xxh3_64_intdigest(data)}
        self._send(peer, number(header), fields, data)

    def _join(self, peer: bytes, header: Mapping[str, Any]) -> None:
        relay, lost = header.get("relay"), header.get("lost")
        if type(relay) is not str or type(lost) is not str or not 0 < len(relay) < 500 or len(lost) > 500:
            raise WireError("relay and lost are addresses")
        if self.fanout.hosts >= MAX_HELD:
            raise WireError(f"{MAX_HELD} hosts are in the fan-out already")
        parent = self.fanout.join(relay, lost, self._clock())
        id = self._current.id if self._current is not None else None
        newest = [id.branch, id.version, id.digest] if id else []
        self._send(peer, number(header), {"ok": True, "parent": parent, "newest": newest})

    def _offer(self, request: HeldLatest) -> _Payload | None:
        if self._current is None:
            return None
        order, here = (request.branch, request.version), self._current.id
        if order >= here.order and request.digest == here.digest:
            return None
        if self._relays and order > here.order:
            return None
        if not request.full:
            for payload in reversed(self._deltas):
                if payload.base == request.digest:
                    self.counts["delta"] += 1
                    return payload
        self.counts["full"] += 1
        return self._current

    def _look(self) -> None:
        now = self._clock()
        if self._pending is not None and self._pending.ready:
            coming, self._pending = self._pending, None
            self._take(coming.file, coming.changes())
        if self._pending is None and now >= self._look_at and not self._idle:
            self._look_for_versions(now)
        for old in [p for p in self._previous if now - p.asked > IDLE_S]:
            self._forget(old)

    def _look_for_versions(self, now: float) -> None:
        """Takes up the pinned version and a new one. A damaged file is reported once."""
        try:
            self._look_for_pinned()
            latest = self._watch.latest()
            if latest is not None and latest != self._seen:
                self._begin(self._watch.file(verify_bytes=False))
        except WeightsCorrupt as error:
            self._look_at = now + AGAIN_S
            if str(error) != self._told:
                self._told = str(error)
                log.error("a version is not served: %s", error)

    def _look_for_pinned(self) -> None:
        pinned = self._watch.pinned()
        if pinned == (self._pinned.id if self._pinned is not None else None):
            return
        file = self._watch.file(verify_bytes=False, version=pinned.order) if pinned is not None else None
        if self._pinned is not None and self._pinned.file is not None:
            self._pinned.file.close()
        self._pinned = _whole(file) if file is not None else None

    def _pin_differs(self, request: HeldLatest) -> bool:
        pinned = self._pinned.id if self._pinned is not None else NO_VERSION
        return request.kept is not None and request.kept != pinned

    def _begin(self, file: File) -> None:
        old = self._current.file if self._current is not None else None
        if self._full_every and self._since_full + 1 >= self._full_every:
            old = None
        self._pending = self._changes.between(old, file, WORTH)

    def _take(self, file: File, made: Delta | None) -> None:
        new = _whole(file)
        old, self._current, self._seen = self._current, new, file.id
        self._since_full += 1
        self.delta_bytes = 0
        if old is not None and made is not None:
            name = f"{new.name}<{old.id.digest}"
            self._deltas.append(_Payload(name, new.id, made.data, old.id.digest, made.sum))
            self.delta_bytes = len(made.data)
        else:
            self._deltas.clear()
            self._since_full = 0
        if old is not None:
            self._previous.append(old)
            while len(self._previous) > 2:
                self._forget(self._previous[0])

    def _forget(self, old: _Payload) -> None:
        self._previous.remove(old)
        if old.file is not None:
            old.file.close()

    def _send(self, peer: bytes, n: int, fields: Mapping[str, Any], data: Frame = b"") -> None:
        header = pack({"n": n, **fields})
        try:
            self._socket.send_multipart([peer, header, data], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            log.debug("an answer could not be delivered: %s", error)  # the mirror asks again


def _whole(file: File) -> _Payload:
    return _Payload(f"{file.id.branch}-{file.id.version}-{file.id.digest}", file.id, file.map, file=file)


def _described(offer: _Payload | None) -> dict[str, Any]:
    if offer is None:
        return {"payload": ""}
    id = [offer.id.branch, offer.id.version, offer.id.digest]
    return {"payload": offer.name, "id": id, "bytes": len(offer.data), "base": offer.base, "sum": offer.sum}
