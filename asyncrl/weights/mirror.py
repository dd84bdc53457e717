"""Keeps a folder of this host at the newest version that a Server (server.py) has.

    Server ──latest, chunks──> Mirror (a thread of one actor per host) ──verified──> folder in shared memory ──> actors

With a relay it hands on what it has to other hosts, and asks the server every few seconds from whom it fetches itself
(tree.py): the server again when that one is silent or lags behind.

Several processes of a host may each have a mirror of the same folder: the one that holds its lock fetches, the others
stand by and take over when that one ends. So each host fetches a version once, and no process is set up for it.

A version appears in the folder complete and verified, or not at all. A chunk whose sum is wrong is asked for again; a
delta that does not give the bits of its digest is thrown away, and the whole file is asked for.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
import zmq

from asyncrl.errors import RunError
from asyncrl.sockets import Endpoint, Link
from asyncrl.weights import delta
from asyncrl.weights.file import TRAILER, digest, digest_of, read_index, verify
from asyncrl.weights.folder import File, Folder, Watch
from asyncrl.weights.protocol import WeightsCorrupt, WeightsVersion
from asyncrl.weights.relay import Relay, relay
from asyncrl.weights.slots import Slot
from asyncrl.wire import WireError, pack, unpack

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
AT_ONCE = 8
"""Chunks asked for and not yet there."""
ANSWER_S = 5.0
"""Without an answer for so long a request is sent again, to where the server is by then."""
WAIT_S = 2.0
"""How long the server may hold a request for what is new."""
STAND_BY_S = 0.2
JOIN_S = 5.0
"""Between two questions from whom to fetch."""
PAUSE_S = (0.1, 5.0)
"""After a version that was not usable: at first, and at most."""
MAX_BEHIND = 12
"""So many answers in a row, a minute's, with a version that is not held yet, and somebody else is fetched from."""
Into = Callable[[int, memoryview], None]


class _Gone(Exception):
    """What is being fetched is no longer offered."""


class _Stopped(Exception):
    pass


@dataclass(frozen=True, slots=True)
class _Offer:
    name: str
    id: WeightsVersion
    size: int
    base: str
    sum: str


@dataclass(frozen=True, slots=True)
class Parent:
    """Another host, from which this one fetches."""

    address: str
    link: Link[zmq.Socket[bytes]]


class Mirror:
    """`start` it; `close` ends it within about a second."""

    def __init__(
        self,
        dir: Path,
        server: Endpoint | str,
        *,
        answer_s: float = ANSWER_S,
        relays: bool = False,
        join_s: float = JOIN_S,
    ) -> None:
        self.dir = dir
        self._server, self._answer_s, self._join_s = Endpoint.of(server), answer_s, join_s
        self._relays = relays
        self._relay: Relay | None = None
        self._parent: Parent | None = None
        self._lost, self._join_at, self._behind = "", 0.0, 0
        self._stop = threading.Event()
        self._numbers = itertools.count(1)
        self._thread = threading.Thread(target=self._run, name="weights mirror", daemon=True)
        self._users: int | None = None
        self._failed: Exception | None = None
        self.counts: Counter[str] = Counter()
        """full, delta (taken over), received_bytes, bad_chunks, corrupt, again (asked again), lost (hosts that were
        fetched from): since the start."""

    def start(self) -> None:
        """Raises RunError when the folder belongs to somebody else."""
        owned(self.dir.parent)
        owned(self.dir)
        self._users = os.open(self.dir / ".users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._users, fcntl.LOCK_SH)
        self._thread.start()

    def check(self) -> None:
        """Raises RunError when the thread ended by an error: then nothing new would ever come."""
        if self._failed is not None:
            raise RunError(f"weights are no longer received: {self._failed!r}") from self._failed

    def close(self) -> None:
        """The last one of the host removes the folder."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10.0)
        if self._users is None:
            return
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.dir, ignore_errors=True)
        os.close(self._users)
        self._users = None

    def _run(self) -> None:
        try:
            with self._alone() as mine:
                if mine:
                    self._fetch_all()
        except _Stopped:
            return
        except Exception as error:  # `check` raises it where it is seen
            self._failed = error
            log.exception("the mirror ended")

    def _fetch_all(self) -> None:
        link: Link[zmq.Socket[bytes]] = Link(zmq.Context.instance(), zmq.DEALER, self._server, identity="mirror")
        try:
            folder = Folder(self.dir)
            self._relay = relay(self.dir, self._server) if self._relays else None
            self._follow(link, folder)
        finally:
            link.close()
            self._leave()
            if self._relay is not None:
                self._relay.close()

    def _follow(self, link: Link[zmq.Socket[bytes]], folder: Folder) -> None:
        watch = Watch(self.dir)
        full, pause_s = False, PAUSE_S[0]
        while not self._stop.is_set():
            try:
                held = watch.latest()
                if self._relay is not None and time.monotonic() >= self._join_at:
                    self._join(link, self._relay.address, held)
                source = self._parent.link if self._parent is not None else link
                offer = self._latest(source, held, full)
                if offer is None:
                    continue
                self._take(source, folder, watch, offer)
                full, pause_s = False, PAUSE_S[0]
            except _Gone:
                continue
            except (WeightsCorrupt, WireError, OSError) as error:
                self.counts["corrupt"] += 1
                log.error("a version was not taken over, and is asked for again as a whole: %s", error)
                full = True
                self._stop.wait(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S[1])

    def _latest(self, link: Link[zmq.Socket[bytes]], held: WeightsVersion | None, full: bool) -> _Offer | None:
        says = [held.branch, held.version, held.digest] if held else [-1, -1, ""]
        n = self._ask(link, {"op": "latest", "held": says, "full": full, "wait_s": WAIT_S})
        until = time.monotonic() + WAIT_S + self._answer_s
        while time.monotonic() < until:
            for header, _ in self._answers(link):
                if header.get("n") == n:
                    return _offer(header)
        self.counts["again"] += 1
        link.follow()
        self._silent()
        return None

    def _join(self, server: Link[zmq.Socket[bytes]], address: str, held: WeightsVersion | None) -> None:
        """Fetch from whom the server says. Without its answer all stays as it was."""
        self._join_at = time.monotonic() + self._join_s
        n = self._ask(server, {"op": "join", "relay": address, "lost": self._lost})
        until = time.monotonic() + min(1.0, self._answer_s)
        while time.monotonic() < until:
            for header, _ in self._answers(server):
                if header.get("n") != n:
                    continue
                if not header.get("ok") or type(header.get("parent")) is not str:
                    raise WireError(f"the weights server refused: {header.get('message')}")
                newest = header.get("newest")
                lags = bool(newest) and (held is None or newest != [held.branch, held.version, held.digest])
                self._behind, self._lost = self._behind + 1 if lags else 0, ""
                self._fetch_from(header["parent"])
                if self._behind > MAX_BEHIND:
                    self._silent()
                return

    def _fetch_from(self, address: str) -> None:
        if address == (self._parent.address if self._parent is not None else ""):
            return
        self._leave()
        if address:
            end = Endpoint("weights", address, keys=self._server.keys)
            self._parent = Parent(address, Link(zmq.Context.instance(), zmq.DEALER, end, identity="mirror"))

    def _silent(self) -> None:
        """Who was asked does not answer, or gives nothing new: the server is asked, now, for another one."""
        if self._parent is not None:
            self._lost, self._join_at, self._behind = self._parent.address, 0.0, 0
            self.counts["lost"] += 1
            self._leave()

    def _leave(self) -> None:
        if self._parent is not None:
            self._parent.link.close()
            self._parent = None

    def _take(self, link: Link[zmq.Socket[bytes]], folder: Folder, watch: Watch, offer: _Offer) -> None:
        slot = folder.begin()
        try:
            if offer.base:
                self._by_delta(link, slot, watch, offer)
            else:
                slot.reserve(offer.size)
                self._fetch(link, offer, lambda offset, data: slot.put(offset, data))
                slot.finish(offer.size)
            entries = read_index(slot.map, offer.name)
            if digest_of(entries) != offer.id.digest:
                raise WeightsCorrupt(f"what was fetched as {offer.name} has another digest")
            verify(slot.map, entries, offer.name)
        except BaseException:
            slot.remove()
            raise
        self.counts["delta" if offer.base else "full"] += 1
        folder.commit(slot, offer.id)

    def _by_delta(self, link: Link[zmq.Socket[bytes]], slot: Slot, watch: Watch, offer: _Offer) -> None:
        base: File = watch.file(verify_bytes=False)
        try:
            if offer.size > len(base.map):
                raise WeightsCorrupt(f"a delta of {offer.size} bytes is larger than what it changes")
            made = bytearray(offer.size)

            def write(offset: int, data: memoryview) -> None:
                made[offset : offset + len(data)] = data

            self._fetch(link, offer, write)
            if digest(made) != offer.sum:
                raise WeightsCorrupt(f"the bytes of the delta {offer.name} are not those of its digest")
            slot.reserve(len(base.map))
            index = delta.apply(memoryview(made), base.map, base.entries, slot.map)
            end = max((e.end for e in base.entries), default=0)
            slot.write(end, index)
            slot.finish(end + len(index))
        finally:
            base.close()

    def _fetch(self, link: Link[zmq.Socket[bytes]], offer: _Offer, into: Into) -> None:
        """Every chunk once, in any order; after silence, also of a server that was started anew, it goes on."""
        missing = deque(range(0, offer.size, CHUNK_BYTES))
        asked: dict[int, float] = {}
        while missing or asked:
            while missing and len(asked) < AT_ONCE:
                offset = missing.popleft()
                self._ask(link, {"op": "chunk", "payload": offer.name, "offset": offset, "length": CHUNK_BYTES})
                asked[offset] = time.monotonic() + self._answer_s
            for header, data in self._answers(link):
                if not header.get("ok") and header.get("code") == "gone":
                    raise _Gone
                offset = header.get("offset", -1)
                if header.get("payload") != offer.name or offset not in asked:
                    continue  # of something fetched before, or a second answer
                del asked[offset]
                expected = min(CHUNK_BYTES, offer.size - offset)
                if len(data) != expected or xxhash.xxh3_64_intdigest(data) != header.get("sum"):
                    self.counts["bad_chunks"] += 1
                    missing.append(offset)
                    continue
                into(offset, data)
                self.counts["received_bytes"] += expected
            now = time.monotonic()
            if late := [offset for offset, until in asked.items() if now > until]:
                self.counts["again"] += len(late)
                if self._parent is not None:
                    self._silent()
                    raise _Gone
                link.follow()
                for offset in late:
                    del asked[offset]
                missing.extendleft(reversed(late))

    def _ask(self, link: Link[zmq.Socket[bytes]], request: Mapping[str, Any]) -> int:
        n = next(self._numbers)
        with contextlib.suppress(zmq.Again):  # nobody is there: asked again after `answer_s`
            link.socket.send(pack({"n": n, **request}), zmq.NOBLOCK)
        return n

    def _answers(self, link: Link[zmq.Socket[bytes]]) -> Iterator[tuple[dict[str, Any], memoryview]]:
        """What is there, after at most a tenth of a second."""
        if self._stop.is_set():
            raise _Stopped
        if not link.socket.poll(100):
            return
        for _ in range(AT_ONCE):
            try:
                frames = link.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if len(frames) == 2:
                yield unpack(frames[0].buffer), frames[1].buffer

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Waits until this is the one mirror of the folder that fetches. False: stopped before that."""
        file = os.open(self.dir / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not self._stop.is_set():
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self._stop.wait(STAND_BY_S)
                else:
                    yield True
                    return
            yield False
        finally:
            os.close(file)


def owned(folder: Path) -> None:
    """Makes a folder for its owner alone. Raises RunError when it is there and is not."""
    folder.mkdir(mode=0o700, exist_ok=True)
    stat = folder.stat()
    if stat.st_uid != os.getuid() or stat.st_mode & 0o077:
        raise RunError(f"{folder} belongs to, or is open for, others than this user: remove it, and start again.")


def _offer(header: Mapping[str, Any]) -> _Offer | None:
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
    return _Offer(str(texts[0]), WeightsVersion(*id), size, str(texts[1]), str(texts[2]))
