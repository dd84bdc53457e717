"""Keeps a folder of this host at the newest version that a WeightsServer (server.py) has, and at the pinned one.

    WeightsServer ──latest, chunks──> Mirror (a thread per host) ──verified──> folder in shared memory ──> actors

With a relay it serves its versions to other hosts, and asks the server every few seconds whom to fetch from itself
(fanout.py): it returns to the server if that host is silent or lags behind.

Several processes of a host may each have a mirror of the same folder: the one that holds its lock fetches, and another
takes over when it ends. So each host fetches a version once, without a process of its own for it.

A version appears in the folder complete and verified, or not at all. A chunk with a wrong checksum is requested again;
after a delta with a wrong digest the full file is requested.
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
from asyncrl.weights.local.reused_files import ReusedFile
from asyncrl.weights.local.shared_folder import SharedFolder
from asyncrl.weights.network import delta
from asyncrl.weights.network.relay import Relay, relay
from asyncrl.weights.network.source import Gone, Offer, Silent, Source, Stopped
from asyncrl.weights.protocol import WeightsCorrupt, WeightsVersion
from asyncrl.wire import WireError

log = logging.getLogger(__name__)

ANSWER_S = 5.0
"""A request without a reply for so many seconds is sent again, to the present address of the server."""
JOIN_S = 5.0
"""Seconds between two `join` requests."""
PAUSE_S = (0.1, 5.0)
"""Pause after an unusable version, in seconds: the first, and the longest."""
MAX_BEHIND = 12
"""Replies in a row (a minute of them) with a version not held yet, after which the host is left."""


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
        """Address and client of another host that is fetched from."""
        self._lost, self._join_at, self._behind = "", 0.0, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights mirror", daemon=True)
        self._failed: Exception | None = None
        self.counts: Counter[str] = Counter()
        """Since the start: full, delta, pinned (received), received_bytes, bad_chunks, corrupt, again (requests
        repeated), lost (silent hosts), relays_ended."""

    def start(self) -> None:
        """Raises RunError if the folder belongs to another user."""
        self._shared.enter()
        self._thread.start()

    def check(self) -> None:
        """Raises RunError if the thread has failed, so that no newer version would arrive."""
        if self._failed is not None:
            raise RunError(f"weights are no longer received: {self._failed!r}") from self._failed

    def close(self) -> None:
        """End the thread; the last mirror of the host removes the folder."""
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
        except Exception as error:  # raised by the next `check`
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
                if self._followed(server, folder, watch, full):
                    full, pause_s = False, PAUSE_S[0]
            except Gone:
                continue
            except Silent:
                self._lose()
            except (WeightsCorrupt, WireError, OSError) as error:
                self.counts["corrupt"] += 1
                log.error("%s: a version was refused, and is requested again in full: %s", self.dir, error)
                full = True
                self._stop.wait(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S[1])

    def _followed(self, server: Source, folder: Folder, watch: Watch, full: bool) -> bool:
        """Asks once for the newest version and the pinned one. Returns whether a version was taken."""
        held, kept = watch.latest(), watch.pinned()
        if self._relay is not None and time.monotonic() >= self._join_at:
            if self._relay.ended:
                self._start_again(self._relay)
            self._join(server, self._relay.address if self._relay is not None else "", held)
        source = self._parent[1] if self._parent is not None else server
        offer, pinned = source.latest(held, kept, full)
        if pinned is None or pinned.id in (held, kept):  # before `held` is replaced
            self._keep(source, folder, watch, pinned)
        if offer is not None:
            self._take(source, folder, watch, offer)
        self._keep(source, folder, watch, pinned)
        return offer is not None

    def _start_again(self, ended: Relay) -> None:
        """Replace a relay that has failed, whose address the server must not name to others any more. If this host
        can listen no longer, it only fetches, from the server."""
        self.counts["relays_ended"] += 1
        ended.close()
        self._relay = relay(self.dir, self._end)
        self._leave()

    def _join(self, server: Source, address: str, held: WeightsVersion | None) -> None:
        """Fetch from the host that the server names. Without a reply, or when it refuses, nothing changes."""
        self._join_at = time.monotonic() + self._join_s
        try:
            reply = server.join(address, self._lost) if address else None
        except WireError as error:
            log.warning("%s: this host hands no weights on for %g s: %s", self.dir, self._join_s, error)
            return
        if reply is None:
            return
        parent, newest = reply
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
        """Leave a host that does not answer or lags behind, and ask the server at once for another one."""
        if self._parent is not None:
            self._lost, self._join_at, self._behind = self._parent[0], 0.0, 0
            self.counts["lost"] += 1
            self._leave()

    def _leave(self) -> None:
        if self._parent is not None:
            self._parent[1].close()
            self._parent = None

    def _keep(self, source: Source, folder: Folder, watch: Watch, pinned: Offer | None) -> None:
        """Keep the version that the learner has pinned for an evaluation: the newest one here, or fetched in full."""
        kept = watch.pinned()
        if pinned is None:
            if kept is not None:
                folder.unpin()
        elif pinned.id == kept:
            return
        elif pinned.id != watch.latest() or not folder.pin(pinned.id.order) or watch.pinned() != pinned.id:
            folder.keep_pinned(self._fetched(source, folder, watch, pinned), pinned.id)
            self.counts["pinned"] += 1

    def _take(self, source: Source, folder: Folder, watch: Watch, offer: Offer) -> None:
        slot = self._fetched(source, folder, watch, offer)
        self.counts["delta" if offer.base else "full"] += 1
        folder.commit(slot, offer.id)

    def _fetched(self, source: Source, folder: Folder, watch: Watch, offer: Offer) -> ReusedFile:
        """A file of the folder with a verified version, which is not named yet."""
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
                raise WeightsCorrupt(f"{offer.name}, as fetched, has another digest")
            verify(slot.map, entries, offer.name)
        except BaseException:
            slot.remove()
            raise
        return slot

    def _by_delta(self, source: Source, slot: ReusedFile, watch: Watch, offer: Offer) -> None:
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
