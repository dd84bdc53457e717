"""The learner's end of channels over which weights go from GPU to GPU: `cuda_ipc` and `nccl`.

    parameters ──copied──> slot 0 | slot 1 (snapshot.py) ──mapped, or broadcast──> engines
                             one is the newest, the other may still be read (loans.py)

    takes      `latest`: what is newer than what I hold; `lend`: the newest, to read; `back`; `join`, `send`: of a group
    gives      names, shapes, checksums and places of the tensors; how their memory is mapped, or where the group meets
    unblocks   a held `latest`: a publication, or its wait_s being over

Training goes on in its own memory meanwhile, and waits for no engine: only a publication waits, until one of the slots
is not read, at most `LEASE_S`. A thread of the learner's process answers; the bytes go the other way.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgpack
import torch
import zmq
from torch import Tensor

from asyncrl.errors import RunError
from asyncrl.sockets import Endpoint, Listener
from asyncrl.weights.device.loans import Lending
from asyncrl.weights.device.snapshot import CHUNK_BYTES, Snapshot
from asyncrl.weights.device.transports import Way
from asyncrl.weights.protocol import WeightsVersion
from asyncrl.wire import WireError, pack, unpack

log = logging.getLogger(__name__)

SLOTS = 2
LEASE_S = 60.0
"""A reader that takes longer may have died; its version is written over, and it must not serve what it read."""
FORGET_S = 120.0
"""A reader that has asked for nothing for so long has gone; actors ask every few seconds what is new."""
LOOK_MS = 20
MAX_REQUEST_BYTES = 64 << 10
MAX_WAIT_S = 60.0


class DevicePublisher:
    def __init__(
        self,
        where: Endpoint | str,
        way: Way,
        device: torch.device,
        *,
        lease_s: float = LEASE_S,
        forget_s: float = FORGET_S,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._way, self._lease_s, self._forget_s = way, lease_s, forget_s
        self._slots = [Snapshot(device, chunk_bytes) for _ in range(SLOTS)]
        self._lending = Lending(SLOTS, lease_s)
        self._newest: WeightsVersion | None = None
        self._changed = threading.Condition()
        """Over what stands above."""
        self._start = uuid.uuid4().hex
        self._held: dict[bytes, tuple[dict[str, Any], float]] = {}
        self._heard: dict[str, float] = {}
        """When each reader asked for something."""
        self._listener = Listener(zmq.ROUTER, where, MAX_REQUEST_BYTES, {})
        self._failed: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def publish(self, branch: int, version: int, named: Iterable[tuple[str, Tensor]]) -> WeightsVersion:
        """Raises RunError when engines read both slots for longer than they may, or can ask for nothing any more."""
        if self._failed is not None:
            raise RunError(f"weights are no longer handed out: {self._failed!r}") from self._failed
        with self._changed:
            slot = self._lending.begin(time.monotonic())
            deadline = time.monotonic() + 2 * self._lease_s
            while slot is None:
                if time.monotonic() > deadline:
                    raise RunError(f"version {version} has no slot to be written to within {2 * self._lease_s:g} s")
                self._changed.wait(0.05)
                slot = self._lending.begin(time.monotonic())
        id = WeightsVersion(branch, version, self._slots[slot].fill(version, named))
        with self._changed:
            self._lending.commit(slot)
            self._newest = id
        return id

    def latest(self) -> WeightsVersion | None:
        """Of this process: versions on a GPU end with it."""
        return self._newest

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5.0)
        self._way.close()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # `publish` raises it where it is seen
            self._failed = error
            log.exception("the weights' thread ended")
        finally:
            self._listener.close()

    def _serve(self) -> None:
        socket = self._listener.socket
        while not self._stop.is_set():
            if socket.poll(LOOK_MS):
                for _ in range(64):
                    try:
                        frames = socket.recv_multipart(zmq.NOBLOCK)
                    except zmq.Again:
                        break
                    self._handle(frames)
            now, newest = time.monotonic(), self._newest
            for peer, (request, until) in list(self._held.items()):
                news = newest is not None and _newer(newest, request["held"])
                if news or now >= until:
                    del self._held[peer]
                    self._answer(peer, request, {"id": _said(newest) if news else None})
            for reader in [reader for reader, at in self._heard.items() if now - at > self._forget_s]:
                del self._heard[reader]
                self._way.forget(reader)

    def _handle(self, frames: Sequence[bytes]) -> None:
        peer, request = frames[0], {}
        try:
            if len(frames) != 2:
                raise WireError(f"a request has one frame, got {len(frames) - 1}")
            request = unpack(frames[1])
            self._act(peer, request)
        except WireError as error:
            log.debug("refused a request: %s", error)
            self._answer(peer, request, {"ok": False, "message": str(error)})

    def _act(self, peer: bytes, request: dict[str, Any]) -> None:
        op, reader = request.get("op"), request.get("reader")
        if type(reader) is not str or not 0 < len(reader) < 200:
            raise WireError("reader is not a name")
        self._heard[reader] = time.monotonic()
        if op == "latest":
            held, wait_s = request.get("held"), request.get("wait_s")
            if not isinstance(held, list) or [type(x) for x in held] != [int, int, str]:
                raise WireError("held is not [branch, version, digest]")
            if type(wait_s) not in (int, float) or not 0 <= float(wait_s or 0) <= MAX_WAIT_S:
                raise WireError(f"wait_s are seconds of 0..{MAX_WAIT_S:g}")
            self._held[peer] = request, time.monotonic() + float(wait_s or 0)
        elif op == "lend":
            self._lend(peer, request, reader)
        elif op == "back":
            with self._changed:
                whole = self._lending.give_back(reader)
                self._changed.notify()
            self._answer(peer, request, {"whole": whole})
        elif op == "join":
            ranks = request.get("ranks")
            if type(ranks) is not int or not 0 < ranks < 1024:
                raise WireError("ranks are the processes that join")
            self._answer(peer, request, dict(self._way.join(reader, ranks)))
        elif op == "send":
            with self._changed:
                loan = self._lending.lent(reader)
            if loan is None:
                raise WireError(f"{reader} was lent nothing that is still there")
            self._way.send(reader, self._slots[loan.slot])
            self._answer(peer, request, {})
        else:
            raise WireError("op is none of latest, lend, back, join, send")

    def _lend(self, peer: bytes, request: dict[str, Any], reader: str) -> None:
        with self._changed:
            loan, id = self._lending.lend(reader, time.monotonic()), self._newest
        if loan is None or id is None:
            raise WireError("nothing was published yet")
        snapshot = self._slots[loan.slot]
        entries = [[e.name, e.dtype, e.shape, e.offset, e.digest] for e in snapshot.layout.entries]
        said = {"id": _said(id), "sizes": list(snapshot.layout.sizes), **self._way.lend(snapshot)}
        self._answer(peer, request, said, msgpack.packb(entries))

    def _answer(self, peer: bytes, request: Mapping[str, Any], said: dict[str, Any], more: bytes = b"") -> None:
        n = request.get("n")
        header = pack({"ok": True, "n": n if type(n) is int and abs(n) < 2**63 else -1, "start": self._start, **said})
        with contextlib.suppress(zmq.ZMQError):  # whoever asked has gone, or asks again
            self._listener.socket.send_multipart([peer, header, more], zmq.NOBLOCK)


def _said(id: WeightsVersion | None) -> list[Any] | None:
    return [id.branch, id.version, id.digest] if id is not None else None


def _newer(newest: WeightsVersion, held: Sequence[Any]) -> bool:
    return newest.order > (held[0], held[1]) or newest.digest != held[2]
