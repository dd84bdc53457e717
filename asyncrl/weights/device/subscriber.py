"""An actor's end of `cuda_ipc` and `nccl`: what is newest (a thread asks), and versions that the learner lends.

An engine in this process copies it here; an engine with workers of its own is told how they get it (`transfer`).
Either way every tensor's checksum is compared before it is used, and the learner is asked, before anything is sampled,
whether what was read was whole all the time.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack
import torch
import zmq
from torch import Tensor

from asyncrl.errors import RunError
from asyncrl.sockets import Endpoint, Link
from asyncrl.weights.device.cuda_ipc import mapped
from asyncrl.weights.device.process_group import Group
from asyncrl.weights.device.snapshot import Layout, all_views
from asyncrl.weights.local.file import checked_entries, digest_of
from asyncrl.weights.protocol import WeightsCorrupt, WeightsVersion
from asyncrl.wire import WireError, pack, unpack

log = logging.getLogger(__name__)

ANSWER_S = 5.0
WAIT_S = 2.0
LOOK_MS = 50
MAX_LAYOUT_BYTES = 64 << 20
Map = Callable[[dict[str, Any], torch.device], Tensor]


class Line:
    """Requests to the learner, one after another; for one thread at a time."""

    def __init__(self, server: Endpoint | str, reader: str, answer_s: float = ANSWER_S) -> None:
        self._link: Link[zmq.Socket[bytes]] = Link(zmq.Context.instance(), zmq.DEALER, server, identity=reader)
        self._reader, self._answer_s = reader, answer_s
        self._numbers = itertools.count(1)
        self._lock, self._closing = threading.Lock(), threading.Event()

    def ask(self, op: str, patience_s: float = 0.0, **fields: Any) -> tuple[dict[str, Any], bytes]:
        """Raises WeightsCorrupt when there is no answer in time, or a refusal."""
        with self._lock:
            n = next(self._numbers)
            try:
                self._link.socket.send(pack({"op": op, "n": n, "reader": self._reader, **fields}), zmq.NOBLOCK)
            except zmq.Again:
                self._link.follow()
                raise WeightsCorrupt(f"the learner is not there ({self._link}): {op} cannot be asked") from None
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
                    continue  # to a question that was given up
                if not header.get("ok"):
                    raise WeightsCorrupt(f"the learner refused {op}: {header.get('message')}")
                return header, frames[1]
            self._link.follow()
            raise WeightsCorrupt(f"the learner did not answer {op} within {patience_s + self._answer_s:g} s")

    def end(self) -> None:
        """A question that waits for its answer is given up."""
        self._closing.set()

    def close(self) -> None:
        self.end()
        with self._lock:
            self._link.close()


class LentWeights:
    """A version that the learner keeps until `close`, or until it has waited too long."""

    def __init__(self, subscriber: DeviceSubscriber, said: Mapping[str, Any], layout: Layout) -> None:
        self.id = WeightsVersion(*said["id"])
        self.layout = layout
        self._subscriber, self._said = subscriber, said
        self._copied: list[tuple[str, Tensor]] | None = None
        self._lent = True

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Copied into this process, once; each checksum compared. Raises WeightsCorrupt."""
        if self._copied is None:
            chunks = self._subscriber.chunks(self._said, self.layout)
            self._copied = [(name, tensor.clone()) for name, tensor in all_views(self.layout, chunks)]
            self.settle()
        yield from self._copied

    def transfer(self) -> dict[str, Any]:
        """For an engine's own processes: what they need to get the tensors."""
        entries = [[e.name, e.dtype, list(e.shape), e.offset, e.digest] for e in self.layout.entries]
        return {"sizes": list(self.layout.sizes), "entries": entries, "handles": self._said["handles"]}

    def group(self, ranks: int) -> dict[str, Any] | None:
        """Where `ranks` processes of the engine must meet the learner now; None: nowhere, or they have met."""
        return self._subscriber.group(self._said, ranks)

    def send(self) -> None:
        """The group gets it now. Raises WeightsCorrupt."""
        if not self._said["handles"]:
            self._subscriber.send()

    def settle(self) -> None:
        """It was read. Raises WeightsCorrupt when it may have been written over meanwhile: then it must not be used."""
        answer, _ = self._subscriber.line.ask("back")
        self._lent = False
        if not answer.get("whole"):
            raise WeightsCorrupt(
                f"version {self.id.version} was read for too long and may be torn: the learner has written over it"
            )

    def close(self) -> None:
        self._copied = None
        lent, self._lent = self._lent, False
        try:
            if lent:
                self._subscriber.line.ask("back")
        except WeightsCorrupt as error:
            log.warning("weights were not given back, and are when their time is over: %s", error)


class DeviceSubscriber:
    def __init__(
        self,
        server: Endpoint | str,
        reader: str,
        device: Callable[[], torch.device],
        *,
        answer_s: float = ANSWER_S,
        map_chunk: Map = mapped,
    ) -> None:
        """`device`: where an engine in this process wants tensors; asked when they are copied."""
        self.line = Line(server, reader, answer_s)
        self._device, self._map = device, map_chunk
        self._watch = Line(server, reader, answer_s)
        self._newest: WeightsVersion | None = None
        self._group: tuple[str, int, Group | None] | None = None
        """The learner's start, processes, and the group when they are this one."""
        self._stop = threading.Event()
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._follow, name="weights", daemon=True)
        self._thread.start()

    def latest(self) -> WeightsVersion | None:
        """Raises RunError when nothing new can come any more."""
        if self._failed is not None:
            raise RunError(f"weights are no longer received: {self._failed!r}") from self._failed
        return self._newest

    def open(self, verify: bool = True) -> LentWeights:
        """Checksums are always compared, when the tensors are read."""
        said, more = self.line.ask("lend")
        try:
            sizes, handles = [int(n) for n in said["sizes"]], said["handles"]
            id = WeightsVersion(*said["id"])
            entries = checked_entries(msgpack.unpackb(more), sum(sizes), "the learner's layout", begin=0)
            if min(sizes, default=1) < 1 or (handles and len(handles) != len(sizes)):
                raise WeightsCorrupt("the learner's layout has chunks that are none")
        except (KeyError, TypeError, ValueError, msgpack.exceptions.UnpackException) as error:
            raise WeightsCorrupt(f"the learner's layout cannot be read: {error!r}") from error
        if digest_of(entries) != id.digest:
            raise WeightsCorrupt(f"the learner's layout has another digest than {id}")
        return LentWeights(self, said, Layout(tuple(sizes), entries))

    def close(self) -> None:
        self._stop.set()
        self._watch.end()
        self._thread.join(ANSWER_S)
        self.regroup()
        for line in (self.line, self._watch):
            line.close()

    def chunks(self, said: Mapping[str, Any], layout: Layout) -> Iterator[Tensor]:
        """Into this process."""
        if said["handles"]:
            yield from chunks_of(said["handles"], layout, None, self._device(), self._map)
            return
        try:
            if (meeting := self.group(said, 1)) is not None:
                self._group = (said["start"], 1, met(meeting, 1))
            group = self._group[2] if self._group is not None else None
            self.send()
            yield from chunks_of((), layout, group, self._device(), self._map)
        except RunError as error:
            self.regroup()
            raise WeightsCorrupt(f"weights were not received: {error}") from error

    def group(self, said: Mapping[str, Any], ranks: int) -> dict[str, Any] | None:
        """See LentWeights.group."""
        if said["handles"] or (self._group is not None and self._group[:2] == (said["start"], ranks)):
            return None
        answer, _ = self.line.ask("join", ranks=ranks)
        self._group = (said["start"], ranks, None)
        return {name: answer[name] for name in ("kind", "meet", "size", "wait_s")}

    def send(self) -> None:
        """See LentWeights.send."""
        try:
            self.line.ask("send")
        except WeightsCorrupt:
            self.regroup()  # the learner may have given the group up
            raise

    def regroup(self) -> None:
        """The group is of no use any more: the next version is sent to a new one."""
        if self._group is not None and self._group[2] is not None:
            self._group[2].close()
        self._group = None

    def _follow(self) -> None:
        try:
            while not self._stop.is_set():
                held = self._newest
                says = [held.branch, held.version, held.digest] if held else [-1, -1, ""]
                try:
                    answer, _ = self._watch.ask("latest", WAIT_S, held=says, wait_s=WAIT_S)
                except WeightsCorrupt as error:
                    log.debug("%s", error)  # the launcher starts it anew; actors go on with what they hold
                    self._stop.wait(0.2)
                    continue
                if isinstance(id := answer.get("id"), list):
                    self._newest = WeightsVersion(*id)
        except Exception as error:  # `latest` raises it where it is seen
            self._failed = error
            log.exception("the watch over weights ended")


def met(meeting: Mapping[str, Any], rank: int) -> Group:
    """The group that meets there. Raises RunError."""
    return Group(str(meeting["kind"]), Path(meeting["meet"]), rank, int(meeting["size"]), float(meeting["wait_s"]))


def chunks_of(handles: Sequence[dict[str, Any]], layout: Layout, group: Group | None, device: torch.device,
              map_chunk: Map = mapped) -> Iterator[Tensor]:  # fmt: skip
    """In a process of an engine. Raises RunError."""
    if handles:
        yield from (map_chunk(handle, device) for handle in handles)
    elif group is not None:
        yield from group.receive(layout.sizes, device)
    else:
        raise RunError("weights are to be received by a group that was not joined")
