"""Keeps a folder of this host at the newest version that a Server (server.py) has.

    Server ──latest, chunks──> Mirror (a thread of one actor per host) ──verified──> folder in shared memory ──> actors

With a relay it hands on what it has to other hosts, and asks the server every few seconds from whom it fetches itself
(fanout.py): the server again when that one is silent or lags behind.

Several processes of a host may each have a mirror of the same folder: the one that holds its lock fetches, the others
stand by and take over when that one ends. So each host fetches a version once, and no process is set up for it.

A version appears in the folder complete and verified, or not at all. A chunk whose sum is wrong is asked for again; a
delta that does not give the bits of its digest is thrown away, and the whole file is asked for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from pathlib import Path

from asyncrl.errors import RunError
from asyncrl.sockets import Endpoint
from asyncrl.weights.local.file import digest, digest_of, read_index, verify
from asyncrl.weights.local.folder import File, Folder, Watch
from asyncrl.weights.local.shared_folder import SharedFolder
from asyncrl.weights.local.shm import ShmSubscriber
from asyncrl.weights.local.slots import Slot
from asyncrl.weights.network import delta
from asyncrl.weights.network.relay import Relay, relay
from asyncrl.weights.network.source import Gone, Offer, Silent, Source, Stopped
from asyncrl.weights.protocol import WeightsCorrupt, WeightsVersion
from asyncrl.wire import WireError

log = logging.getLogger(__name__)

ANSWER_S = 5.0
"""Without an answer for so long a request is sent again, to where the server is by then."""
JOIN_S = 5.0
"""Between two questions from whom to fetch."""
PAUSE_S = (0.1, 5.0)
"""After a version that was not usable: at first, and at most."""
MAX_BEHIND = 12
"""So many answers in a row, a minute's, with a version that is not held yet, and somebody else is fetched from."""


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
        self._shared = SharedFolder(dir)
        self._end, self._answer_s, self._join_s = Endpoint.of(server), answer_s, join_s
        self._relays = relays
        self._relay: Relay | None = None
        self._parent: tuple[str, Source] | None = None
        """Another host that is fetched from, and its address."""
        self._lost, self._join_at, self._behind = "", 0.0, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights mirror", daemon=True)
        self._failed: Exception | None = None
        self.counts: Counter[str] = Counter()
        """full, delta (taken over), received_bytes, bad_chunks, corrupt, again (asked again), lost (hosts that were
        fetched from): since the start."""

    def start(self) -> None:
        """Raises RunError when the folder belongs to somebody else."""
        self._shared.enter()
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
        self._shared.leave()

    def _run(self) -> None:
        try:
            with self._shared.alone(self._stop) as mine:
                if mine:
                    self._fetch_all()
        except Stopped:
            return
        except Exception as error:  # `check` raises it where it is seen
            self._failed = error
            log.exception("the mirror ended")

    def _fetch_all(self) -> None:
        server = self._source(self._end, patient=True)
        try:
            folder = Folder(self.dir)
            self._relay = relay(self.dir, self._end) if self._relays else None
            self._follow(server, folder)
        finally:
            server.close()
            self._leave()
            if self._relay is not None:
                self._relay.close()

    def _follow(self, server: Source, folder: Folder) -> None:
        watch = Watch(self.dir)
        full, pause_s = False, PAUSE_S[0]
        while not self._stop.is_set():
            try:
                held = watch.latest()
                if self._relay is not None and time.monotonic() >= self._join_at:
                    self._join(server, self._relay.address, held)
                source = self._parent[1] if self._parent is not None else server
                offer = source.latest(held, full)
                if offer is None:
                    continue
                self._take(source, folder, watch, offer)
                full, pause_s = False, PAUSE_S[0]
            except Gone:
                continue
            except Silent:
                self._lose()
            except (WeightsCorrupt, WireError, OSError) as error:
                self.counts["corrupt"] += 1
                log.error("%s: a version was not taken over, and is asked for again as a whole: %s", self.dir, error)
                full = True
                self._stop.wait(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S[1])

    def _join(self, server: Source, address: str, held: WeightsVersion | None) -> None:
        """Fetch from whom the server says. Without its answer all stays as it was."""
        self._join_at = time.monotonic() + self._join_s
        if (told := server.join(address, self._lost)) is None:
            return
        parent, newest = told
        lags = bool(newest) and (held is None or newest != [held.branch, held.version, held.digest])
        self._behind, self._lost = self._behind + 1 if lags else 0, ""
        self._fetch_from(parent)
        if self._behind > MAX_BEHIND:
            self._lose()

    def _fetch_from(self, address: str) -> None:
        if address == (self._parent[0] if self._parent is not None else ""):
            return
        self._leave()
        if address:
            end = Endpoint("weights", address, keys=self._end.keys)
            self._parent = address, self._source(end, patient=False)

    def _source(self, end: Endpoint, *, patient: bool) -> Source:
        return Source(end, self._answer_s, self._stop, self.counts, patient=patient)

    def _lose(self) -> None:
        """The host that was asked does not answer, or gives nothing new: the server is asked, now, for another one."""
        if self._parent is not None:
            self._lost, self._join_at, self._behind = self._parent[0], 0.0, 0
            self.counts["lost"] += 1
            self._leave()

    def _leave(self) -> None:
        if self._parent is not None:
            self._parent[1].close()
            self._parent = None

    def _take(self, source: Source, folder: Folder, watch: Watch, offer: Offer) -> None:
        slot = folder.begin()
        try:
            if offer.base:
                self._by_delta(source, slot, watch, offer)
            else:
                slot.reserve(offer.size)
                source.fetch(offer, slot.put)
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

    def _by_delta(self, source: Source, slot: Slot, watch: Watch, offer: Offer) -> None:
        base: File = watch.file(verify_bytes=False)
        try:
            if offer.size > len(base.map):
                raise WeightsCorrupt(f"a delta of {offer.size} bytes is larger than what it changes")
            made = bytearray(offer.size)

            def write(offset: int, data: memoryview) -> None:
                made[offset : offset + len(data)] = data

            source.fetch(offer, write)
            if digest(made) != offer.sum:
                raise WeightsCorrupt(f"the bytes of the delta {offer.name} are not those of its digest")
            slot.reserve(len(base.map))
            index = delta.apply(memoryview(made), base.map, base.entries, slot.map)
            end = max((e.end for e in base.entries), default=0)
            slot.write(end, index)
            slot.finish(end + len(index))
        finally:
            base.close()


class MirroredSubscriber(ShmSubscriber):
    """A subscriber whose versions come from another host: a mirror, and what reads its folder."""

    def __init__(self, dir: Path, server: Endpoint | str, relays: bool = False) -> None:
        """`relays`: this host hands on what it fetches."""
        super().__init__(dir)
        self.mirror = Mirror(dir, server, relays=relays)
        self.mirror.start()

    def latest(self) -> WeightsVersion | None:
        """Raises RunError when nothing new can come any more."""
        self.mirror.check()
        return super().latest()

    def close(self) -> None:
        super().close()
        self.mirror.close()
