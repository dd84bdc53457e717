"""An actor's end of `cuda_ipc` and `nccl`: the newest version (a thread asks for it), and versions leased to read.

An engine in this process copies the tensors; an engine with workers of its own passes them what they need (`transfer`).
Either way every checksum is compared before a tensor is used, and before anything is sampled the learner confirms that
the version was not written over while it was read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgpack
import torch
from torch import Tensor

from asyncrl.errors import RunError
from asyncrl.sockets import Endpoint
from asyncrl.weights.device.cuda_ipc import mapped
from asyncrl.weights.device.learner_client import ANSWER_S, LearnerClient
from asyncrl.weights.device.process_group import ProcessGroup
from asyncrl.weights.device.snapshot import SnapshotLayout, all_views
from asyncrl.weights.local.file import checked_entries, digest_of
from asyncrl.weights.protocol import WeightsCorrupt, WeightsVersion

log = logging.getLogger(__name__)

WAIT_S = 2.0
HELD_S = 2.0
"""The learner answers `send` so much later at the most: it waits for other engines."""
Map = Callable[[dict[str, Any], torch.device], Tensor]


class LeasedWeights:
    """A version that the learner keeps unchanged until `close`, or until the lease ends."""

    def __init__(self, subscriber: DeviceSubscriber, terms: Mapping[str, Any], layout: SnapshotLayout) -> None:
        self.id = WeightsVersion(*terms["id"])
        self.layout = layout
        self._subscriber, self._terms = subscriber, terms
        self._copied: list[tuple[str, Tensor]] | None = None
        self._leased = True

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors, copied into this process once, with checksums compared. Raises WeightsCorrupt."""
        if self._copied is None:
            chunks = self._subscriber.chunks(self._terms, self.layout)
            try:
                self._copied = [(name, tensor.clone()) for name, tensor in all_views(self.layout, chunks)]
            except WeightsCorrupt:
                self._subscriber.leave_groups()  # the rest of the chunks is in them
                raise
            self.settle()
        yield from self._copied

    def transfer(self) -> dict[str, Any]:
        """What the engine's own processes need to get the tensors, from the learner's memory or a group."""
        entries = [[e.name, e.dtype, list(e.shape), e.offset, e.digest] for e in self.layout.entries]
        return {"sizes": list(self.layout.sizes), "entries": entries, "handles": self._terms["handles"]}

    def group(self, ranks: int) -> dict[str, Any] | None:
        """Where `ranks` processes of the engine must join the learner now; None if they need not, or have joined."""
        return self._subscriber.group(self._terms, ranks)

    def send(self) -> Mapping[str, Any] | None:
        """Let the learner broadcast it now, to other engines too if they ask within a second: then returns where their
        group met or meets, and `join`: whether this engine's processes have to. None: to the group of `group`. Raises
        WeightsCorrupt."""
        return None if self._terms["handles"] else self._subscriber.send()

    def fall_back(self) -> None:
        """Let the learner broadcast all of it to the group of `group`, after the other one has failed. Raises
        WeightsCorrupt."""
        self._subscriber.fall_back()

    def settle(self) -> None:
        """Release the lease after reading. Raises WeightsCorrupt if it was written over and must not be used."""
        answer, _ = self._subscriber.client.ask("release")
        self._leased = False
        if not answer.get("intact"):
            raise WeightsCorrupt(
                f"version {self.id.version} was read for too long and may be torn: the learner has written over it"
            )

    def close(self) -> None:
        self._copied = None
        leased, self._leased = self._leased, False
        try:
            if leased:
                self._subscriber.client.ask("release")
        except WeightsCorrupt as error:
            log.warning("weights were not released; their lease ends by itself: %s", error)


@dataclass(frozen=True, slots=True)
class _Joined:
    start: str
    """The start of the learner's process."""
    ranks: int
    group: ProcessGroup | None = None
    """None if the processes of the engine joined, and not this one."""


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
        """`device` gives the device for tensors copied into this process; called when they are copied."""
        self.client = LearnerClient(server, reader, answer_s)
        self._device, self._map = device, map_chunk
        self._watch = LearnerClient(server, reader, answer_s)
        self._newest: WeightsVersion | None = None
        self._group: _Joined | None = None
        self._together = ""
        """Where the group of several engines met that the processes of this engine are in."""
        self._together_group: ProcessGroup | None = None
        """None as well if processes of the engine are in it, and not this one."""
        self._stop = threading.Event()
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._follow, name="weights", daemon=True)
        self._thread.start()

    def latest(self) -> WeightsVersion | None:
        """The newest version known here. Raises RunError if the watching thread has failed."""
        if self._failed is not None:
            raise RunError(f"weights are no longer received: {self._failed!r}") from self._failed
        return self._newest

    def pinned(self) -> WeightsVersion | None:
        """None: the learner's GPU keeps no version but the newest (host_copy.py has another)."""
        return None

    def open(self, verify: bool = True, version: tuple[int, int] | None = None) -> LeasedWeights:
        """Lease the newest version. Checksums are compared when the tensors are read, whatever `verify` is. Raises
        WeightsCorrupt if it is not the `version` asked for."""
        if version is not None and (self._newest is None or self._newest.order != version):
            raise WeightsCorrupt(f"version {version} is no longer on the learner's GPU")
        terms, packed = self.client.ask("lease")
        try:
            sizes, handles = [int(n) for n in terms["sizes"]], terms["handles"]
            id = WeightsVersion(*terms["id"])
            entries = checked_entries(msgpack.unpackb(packed), sum(sizes), "the learner's layout", begin=0)
            if min(sizes, default=1) < 1 or (handles and len(handles) != len(sizes)):
                raise WeightsCorrupt("the learner's layout has empty chunks, or not one handle for each")
        except (KeyError, TypeError, ValueError, OverflowError, msgpack.exceptions.UnpackException) as error:
            raise WeightsCorrupt(f"the learner's layout cannot be read: {error!r}") from error
        if digest_of(entries) != id.digest:
            raise WeightsCorrupt(f"the learner's layout has another digest than {id}")
        leased = LeasedWeights(self, terms, SnapshotLayout(tuple(sizes), entries))
        if version is not None and id.order != version:  # published since, and this process has not heard of it
            leased.close()
            raise WeightsCorrupt(f"version {version} is no longer on the learner's GPU, which lent {id.order}")
        return leased

    def close(self) -> None:
        self._stop.set()
        self._watch.end()
        self._thread.join(ANSWER_S)
        self.leave_groups()
        for client in (self.client, self._watch):
            client.close()

    def chunks(self, terms: Mapping[str, Any], layout: SnapshotLayout) -> Iterator[Tensor]:
        """Yields the chunks in memory of this process."""
        if terms["handles"]:
            yield from chunks_of(terms["handles"], layout, None, self._device(), self._map)
            return
        try:
            if (meeting := self.group(terms, 1)) is not None:
                self._group = _Joined(terms["start"], 1, join_group(meeting, 1))
            group = self._group.group if self._group is not None else None
            taken = 0
            if (together := self.send()) is not None:
                try:
                    for chunk in self._join_together(together).receive(layout.sizes, self._device()):
                        yield chunk
                        taken += 1
                except RunError as error:
                    log.warning("the broadcast to several engines failed, now to this one alone: %s", error)
                    self.fall_back()
            if taken < len(layout.sizes):
                yield from islice(chunks_of((), layout, group, self._device(), self._map), taken, None)
        except RunError as error:
            self.leave_groups()
            raise WeightsCorrupt(f"weights were not received: {error}") from error

    def group(self, terms: Mapping[str, Any], ranks: int) -> dict[str, Any] | None:
        """See LeasedWeights.group."""
        joined = self._group is not None and (self._group.start, self._group.ranks) == (terms["start"], ranks)
        if terms["handles"] or joined:
            return None
        answer, _ = self.client.ask("join", ranks=ranks)
        self._group = _Joined(terms["start"], ranks)
        return {name: answer[name] for name in ("kind", "meet", "size", "wait_s")}

    def send(self) -> dict[str, Any] | None:
        """See LeasedWeights.send."""
        try:
            answer, _ = self.client.ask("send", HELD_S, group=self._together)
        except WeightsCorrupt:
            self.leave_groups()  # the learner may have closed them
            raise
        if (together := answer.get("together")) is None:
            return None
        meeting = {name: together[name] for name in ("kind", "meet", "size", "wait_s", "first")}
        join, self._together = meeting["meet"] != self._together, meeting["meet"]
        return meeting | {"join": join}

    def fall_back(self) -> None:
        """See LeasedWeights.fall_back."""
        self._leave_together()
        if self.send() is not None:
            self.leave_groups()
            raise WeightsCorrupt("the learner sends to several engines again what did not arrive so")

    def leave_groups(self) -> None:
        """Close the groups; the next version is sent to new ones."""
        self._leave_together()
        if self._group is not None and self._group.group is not None:
            self._group.group.close()
        self._group = None

    def _leave_together(self) -> None:
        if self._together_group is not None:
            self._together_group.close()
        self._together, self._together_group = "", None

    def _join_together(self, meeting: Mapping[str, Any]) -> ProcessGroup:
        if meeting["join"] or self._together_group is None:
            if self._together_group is not None:
                self._together_group.close()
            self._together_group = join_group(meeting, meeting["first"])
        return self._together_group

    def _follow(self) -> None:
        try:
            while not self._stop.is_set():
                held = self._newest
                fields = [held.branch, held.version, held.digest] if held else [-1, -1, ""]
                try:
                    answer, _ = self._watch.ask("latest", WAIT_S, held=fields, wait_s=WAIT_S)
                except WeightsCorrupt as error:
                    log.debug(
                        "%s", error
                    )  # the launcher restarts the learner; actors continue with the version they hold
                    self._stop.wait(0.2)
                    continue
                if isinstance(id := answer.get("id"), list):
                    self._newest = WeightsVersion(*id)
        except Exception as error:  # raised by the next `latest`
            self._failed = error
            log.exception("the watch over weights ended")


def join_group(meeting: Mapping[str, Any], rank: int) -> ProcessGroup:
    """Join the group at `meeting`. Raises RunError."""
    return ProcessGroup(
        str(meeting["kind"]), Path(meeting["meet"]), rank, int(meeting["size"]), float(meeting["wait_s"])
    )


def chunks_of(
    handles: Sequence[dict[str, Any]],
    layout: SnapshotLayout,
    group: ProcessGroup | None,
    device: torch.device,
    map_chunk: Map = mapped,
) -> Iterator[Tensor]:
    """Yields the chunks in a process of an engine, mapped or received. Raises RunError."""
    if handles:
        yield from (map_chunk(handle, device) for handle in handles)
    elif group is not None:
        yield from group.receive(layout.sizes, device)
    else:
        raise RunError("weights are sent to a group that this process has not joined")
