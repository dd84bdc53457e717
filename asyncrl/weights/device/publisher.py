"""The learner's end of the channels that copy weights from GPU to GPU: `cuda_ipc` and `nccl`.

    parameters ──copied──> slot 0 | slot 1 (snapshot.py) ──mapped, or broadcast──> engines
                             one is the newest, the other may still be read (slot_leases.py); `nccl` has slot 0 alone

    takes      `latest`: is there a newer version; `lease`, `release` of the newest; `join`, `send`: a process group
    gives      names, shapes, checksums and places of the tensors; how their memory is mapped, or where a group meets
    unblocks   a held `latest`: a publication, or the end of its wait_s
               a held `send`: those of the other engines, or the end of GATHER_S (gathering.py)

Training continues in its own memory and waits for no engine: only a publication waits, until a slot is not leased, at
most `LEASE_S` after the last `lease` or `send`. A thread of the learner's process answers requests; the bytes travel by
the transport.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgpack
import torch
import zmq
from torch import Tensor

from asyncrl.errors import RunError
from asyncrl.sockets import Endpoint, Listener
from asyncrl.weights.device.gathering import Asked, Gathering, Party
from asyncrl.weights.device.slot_leases import SlotLease, SlotLeases
from asyncrl.weights.device.snapshot import CHUNK_BYTES, DeviceSnapshot, all_views
from asyncrl.weights.device.transports import Transport
from asyncrl.weights.protocol import WeightsVersion
from asyncrl.weights.requests import MAX_HELD, HeldLatest, held_latest, number
from asyncrl.wire import WireError, pack, unpack

log = logging.getLogger(__name__)

SLOTS = 2
"""Copies of the weights: 2, or 1, with which a publication waits for every transfer that runs (slot_leases.py)."""
LEASE_S = 60.0
"""A reader that takes longer may have died: its slot is written again, and it must not use what it read."""
FORGET_S = 120.0
"""A reader without a request for so long has ended; actors ask for newer versions every few seconds."""
GATHER_S = 1.0
"""An engine that stands still waits so long for others that get the version by the same broadcast."""
FALL_BACK_S = 15.0
"""After a broadcast to several engines has failed: those that live ask again within this, the others have no lease."""
LOOK_MS = 20
MAX_REQUEST_BYTES = 64 << 10


class DevicePublisher:
    def __init__(
        self,
        where: Endpoint | str,
        transport: Transport,
        device: torch.device,
        *,
        slots: int = SLOTS,
        lease_s: float = LEASE_S,
        forget_s: float = FORGET_S,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._transport, self._lease_s, self._forget_s = transport, lease_s, forget_s
        self._slots = [DeviceSnapshot(device, chunk_bytes) for _ in range(slots)]
        self._leases = SlotLeases(slots, lease_s)
        self._newest: WeightsVersion | None = None
        self._changed = threading.Condition()
        """Guards the attributes above."""
        self._start = uuid.uuid4().hex
        self._held: dict[bytes, HeldLatest] = {}
        self._gathering = Gathering(GATHER_S)
        self._sends: dict[str, tuple[bytes, dict[str, Any], SlotLease]] = {}
        """(peer, request, what it has leased) of each reader whose `send` is held."""
        self._heard: dict[str, float] = {}
        """Time of the last request of each reader."""
        self._listener = Listener(zmq.ROUTER, where, MAX_REQUEST_BYTES, {})
        self._failed: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def publish(self, branch: int, version: int, named: Iterable[tuple[str, Tensor]]) -> WeightsVersion:
        """Copies `named` to a free slot and returns its version. Raises RunError if no slot is free for 2 `lease_s`, or
        if the thread that answers requests has ended."""
        if self._failed is not None:
            raise RunError(f"weights are no longer served: {self._failed!r}") from self._failed
        with self._changed:
            slot = self._leases.begin(time.monotonic())
            deadline = time.monotonic() + 2 * self._lease_s
            while slot is None:
                if time.monotonic() > deadline:
                    raise RunError(
                        f"version {version} waited {2 * self._lease_s:g} s for a free slot: actors lease all of them. "
                        "Resume the run; if it happens again, look for a hung actor."
                    )
                self._changed.wait(0.05)
                slot = self._leases.begin(time.monotonic())
        id = WeightsVersion(branch, version, self._slots[slot].fill(version, named))
        with self._changed:
            self._leases.commit(slot)
            self._newest = id
        return id

    def latest(self) -> WeightsVersion | None:
        """The newest version of this process; versions on a GPU end with it."""
        return self._newest

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors of the newest version, checksums compared; valid until the caller's next `publish`.
        Raises WeightsCorrupt."""
        with self._changed:
            newest = self._leases.newest
        if newest is not None:
            yield from all_views(self._slots[newest].layout, self._slots[newest].chunks)

    def pin(self, version: tuple[int, int]) -> bool:
        """False: it keeps none but the latest (host_copy.py keeps another)."""
        return False

    def unpin(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5.0)
        self._transport.close()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # raised by the next `publish`
            self._failed = error
            log.exception("the weights' thread ended")
        finally:
            self._listener.close()

    def _serve(self) -> None:
        while not self._stop.is_set():
            for frames in self._arrived():
                self._handle(frames)
            now = time.monotonic()
            self._answer_held(now)
            for party in self._gathering.due(now):
                for some in [party] if self._transport.free else [(asked,) for asked in party]:
                    self._send(some)
            self._forget_silent(now)

    def _forget_silent(self, now: float) -> None:
        for reader in [reader for reader, at in self._heard.items() if now - at > self._forget_s]:
            del self._heard[reader]
            self._transport.forget(reader)
            self._gathering.forget(reader)
            self._sends.pop(reader, None)

    def _arrived(self) -> Iterator[list[bytes]]:
        """Yields the requests that have arrived, after at most `LOOK_MS`."""
        if not self._listener.socket.poll(LOOK_MS):
            return
        for _ in range(64):
            try:
                yield [bytes(frame.buffer) for frame in self._listener.receive(2)]
            except zmq.Again:
                return

    def _answer_held(self, now: float) -> None:
        """Answer each held `latest` for which there is a newer version, or whose time is up."""
        newest = self._newest
        for peer, request in list(self._held.items()):
            newer = newest is not None and _newer(newest, request)
            if newer or now >= request.until:
                del self._held[peer]
                self._answer(peer, {"n": request.n}, {"id": _as_list(newest) if newer else None})

    def _handle(self, frames: Sequence[bytes]) -> None:
        peer, request = frames[0], {}
        try:
            if len(frames) != 2:
                raise WireError(f"a request has one frame, got {len(frames) - 1}")
            request = unpack(frames[1])
            reader = request.get("reader")
            if type(reader) is not str or not 0 < len(reader) < 200:
                raise WireError(f"reader is {reader!r:.200}; expected text of 1 to 199 characters")
            if len(self._heard) >= MAX_HELD and reader not in self._heard:
                raise WireError(f"{MAX_HELD} readers have asked already")
            self._heard[reader] = time.monotonic()
            op = request.get("op")
            if not isinstance(op, str) or op not in _OPS:
                raise WireError(f"op is {op!r:.99}; expected one of {', '.join(_OPS)}")
            _OPS[op](self, peer, request, reader)
        except WireError as error:
            log.debug("refused a request: %s", error)
            self._answer(peer, request, {"ok": False, "message": str(error)})

    def _op_latest(self, peer: bytes, request: dict[str, Any], _: str) -> None:
        if len(self._held) >= MAX_HELD and peer not in self._held:
            raise WireError(f"{MAX_HELD} requests are waiting already")
        self._held[peer] = held_latest(request, time.monotonic())

    def _op_lease(self, peer: bytes, request: dict[str, Any], reader: str) -> None:
        with self._changed:
            lease, id = self._leases.lease(reader, time.monotonic()), self._newest
        if id is None:
            raise WireError("nothing was published yet")
        if lease is None:
            raise WireError(f"a version newer than {id.version} is being written: ask again")
        snapshot = self._slots[lease.slot]
        entries = [[e.name, e.dtype, e.shape, e.offset, e.digest] for e in snapshot.layout.entries]
        fields = {"id": _as_list(id), "sizes": list(snapshot.layout.sizes), **self._transport.describe(snapshot)}
        self._answer(peer, request, fields, msgpack.packb(entries))

    def _op_release(self, peer: bytes, request: dict[str, Any], reader: str) -> None:
        with self._changed:
            intact = self._leases.release(reader)
            self._changed.notify()
        self._answer(peer, request, {"intact": intact})

    def _op_join(self, peer: bytes, request: dict[str, Any], reader: str) -> None:
        ranks = request.get("ranks")
        if type(ranks) is not int or not 0 < ranks < 1024:
            raise WireError(f"ranks is {ranks!r:.99}; expected a whole number from 1 to 1023")
        self._answer(peer, request, dict(self._transport.join(reader, ranks)))

    def _op_send(self, peer: bytes, request: dict[str, Any], reader: str) -> None:
        self._transport.require_joined(reader)
        group = request.get("group", "")
        if not isinstance(group, str):
            raise WireError("group is not the place where a group met")
        now = time.monotonic()
        with self._changed:
            self._leases.prolong(reader, now)
            lease = self._leases.of(reader)
        if lease is None:
            raise WireError(f"{reader} has nothing leased, or it was written over")
        self._sends[reader] = peer, request, lease
        self._gathering.ask(Asked(reader, group), lease.generation, now)

    def _send(self, party: Party) -> None:
        """Send to those of the party whose lease is still good, and answer all of them."""
        held = [(asked, *self._sends.pop(asked.reader)) for asked in party if asked.reader in self._sends]
        with self._changed:
            lost = {asked.reader for asked, _, _, lease in held if self._leases.of(asked.reader) is not lease}
        good = {asked.reader: lease for asked, _, _, lease in held if asked.reader not in lost}
        meetings: Mapping[str, Any] = {}
        if len(good) > 1:
            snapshot = self._slots[next(iter(good.values())).slot]
            together = tuple(asked for asked in party if asked.reader in good)
            meetings = self._transport.send_together(together, snapshot, lambda: self._curtail(good))
        for asked, peer, request, lease in held:
            if asked.reader in lost:
                fields = {"ok": False, "message": f"what {asked.reader} had leased was written over, or given back"}
                self._answer(peer, request, fields)
                continue
            if asked.reader not in meetings:
                self._transport.send(asked.reader, self._slots[lease.slot], partial(self._drop, asked.reader, lease))
            self._answer(peer, request, {"together": meetings.get(asked.reader)})

    def _curtail(self, leases: Mapping[str, SlotLease]) -> None:
        """A version did not reach all of several readers: those that live ask for it again."""
        with self._changed:
            for reader, lease in leases.items():
                self._leases.curtail(reader, lease, time.monotonic() + FALL_BACK_S)

    def _drop(self, reader: str, lease: SlotLease) -> None:
        """Ends the lease of a reader that the version did not reach, so that no publication waits for it."""
        with self._changed:
            self._leases.drop(reader, lease)
            self._changed.notify()

    def _answer(self, peer: bytes, request: Mapping[str, Any], fields: dict[str, Any], more: bytes = b"") -> None:
        header = pack({"ok": True, "n": number(request), "start": self._start, **fields})
        with contextlib.suppress(zmq.ZMQError):  # the reader has ended, or asks again
            self._listener.socket.send_multipart([peer, header, more], zmq.NOBLOCK)


_OPS: dict[str, Callable[[DevicePublisher, bytes, dict[str, Any], str], None]] = {
    "latest": DevicePublisher._op_latest,
    "lease": DevicePublisher._op_lease,
    "release": DevicePublisher._op_release,
    "join": DevicePublisher._op_join,
    "send": DevicePublisher._op_send,
}


def _as_list(id: WeightsVersion | None) -> list[Any] | None:
    return [id.branch, id.version, id.digest] if id is not None else None


def _newer(newest: WeightsVersion, held: HeldLatest) -> bool:
    return newest.order > (held.branch, held.version) or newest.digest != held.digest
