"""How the bytes of a snapshot reach an engine: it maps the learner's memory, or its processes get a broadcast."""

from __future__ import annotations

import logging
import queue
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from asyncrl.errors import RunError
from asyncrl.weights.device.cuda_ipc import export
from asyncrl.weights.device.gathering import Party
from asyncrl.weights.device.process_group import ProcessGroup
from asyncrl.weights.device.snapshot import DeviceSnapshot
from asyncrl.wire import WireError

log = logging.getLogger(__name__)

Failed = Callable[[], None]
JOIN_S = 60.0
"""Seconds in which the processes of an engine meet the learner, and in which a chunk must have arrived."""
TOGETHER_S = 10.0
"""The same for a group of several engines, all of which stand still until it is known that one of them is lost."""


class Transport(Protocol):
    def describe(self, snapshot: DeviceSnapshot) -> Mapping[str, Any]:
        """What a reader must know besides the layout."""
        ...

    def join(self, reader: str, ranks: int) -> Mapping[str, Any]:
        """Where `ranks` processes of the reader meet the learner. Raises WireError."""
        ...

    def require_joined(self, reader: str) -> None:
        """Raises WireError if nothing can be sent to the reader."""
        ...

    def send(self, reader: str, snapshot: DeviceSnapshot, failed: Failed) -> None:
        """Send to the processes that joined; returns at once. `failed` is called, in another thread, as soon as it is
        known that they do not get all of it."""
        ...

    @property
    def free(self) -> bool:
        """Whether `send_together` would begin at once."""
        ...

    def send_together(self, party: Party, snapshot: DeviceSnapshot, failed: Failed) -> Mapping[str, Mapping[str, Any]]:
        """Send once to the processes of several readers; as `send`. Returns where each reader's processes meet, who
        need not if the reader is in that group."""
        ...

    def forget(self, reader: str) -> None:
        """Release what is held for a reader that has ended."""
        ...

    def close(self) -> None: ...


class Mapped:
    """Readers map the learner's memory. `export` gives what they need to map a chunk."""

    def __init__(self, export: Callable[[Tensor], dict[str, Any]] = export) -> None:
        self._export = export
        # Torch keeps a record of every export as long as the memory exists, and chunks stay for the whole run.
        self._exported: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def describe(self, snapshot: DeviceSnapshot) -> Mapping[str, Any]:
        return {"handles": [self._handle(chunk) for chunk in snapshot.chunks]}

    def join(self, reader: str, ranks: int) -> Mapping[str, Any]:
        raise WireError("weights are mapped here: there is no group to join")

    def require_joined(self, reader: str) -> None:
        raise WireError("weights are mapped here: nothing is sent")

    def send(self, reader: str, snapshot: DeviceSnapshot, failed: Failed) -> None:
        self.require_joined(reader)

    free = False

    def send_together(self, party: Party, snapshot: DeviceSnapshot, failed: Failed) -> Mapping[str, Mapping[str, Any]]:
        raise WireError("weights are mapped here: nothing is sent")

    def forget(self, reader: str) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""

    def _handle(self, chunk: Tensor) -> dict[str, Any]:
        handle: dict[str, Any] | None = self._exported.get(chunk)  # type: ignore[no-untyped-call]
        if handle is None:
            handle = self._exported[chunk] = self._export(chunk)
        return handle


class Broadcast:
    """Each reader has a process group and a thread; those that ask at the same time have one more, together. `folder`,
    visible to all, is where the members of a group meet."""

    def __init__(self, kind: str, folder: Path, wait_s: float = JOIN_S, together_s: float = TOGETHER_S) -> None:
        self._kind, self._folder, self._wait_s, self._together_s = kind, folder, wait_s, together_s
        self._readers: dict[str, _Reader] = {}
        self._ranks: dict[str, int] = {}
        self._all = _Reader("several engines")
        self._members: list[str] = []
        """Of the group of `_all`."""
        self._meet = ""
        """Where they met."""

    def describe(self, snapshot: DeviceSnapshot) -> Mapping[str, Any]:
        return {"handles": []}

    def join(self, reader: str, ranks: int) -> Mapping[str, Any]:
        if reader not in self._readers:
            self._readers[reader] = _Reader(reader)
        self._ranks[reader] = ranks
        meet = self._meet_anew(self._readers[reader], 1 + ranks, self._wait_s)
        return {"kind": self._kind, "meet": meet, "size": 1 + ranks, "wait_s": self._wait_s}

    def require_joined(self, reader: str) -> None:
        if reader not in self._readers:
            raise WireError(f"{reader} asks for weights without having joined")

    def send(self, reader: str, snapshot: DeviceSnapshot, failed: Failed) -> None:
        self._readers[reader].send(snapshot.filled(), failed)

    @property
    def free(self) -> bool:
        return self._all.idle

    def send_together(self, party: Party, snapshot: DeviceSnapshot, failed: Failed) -> Mapping[str, Mapping[str, Any]]:
        members = sorted(asked.reader for asked in party)
        ends = list(accumulate((self._ranks[reader] for reader in members), initial=1))
        if self._all.lost or members != self._members or any(asked.group != self._meet for asked in party):
            self._members, self._meet = members, self._meet_anew(self._all, ends[-1], self._together_s)
        self._all.send(snapshot.filled(), failed)
        common = {"kind": self._kind, "meet": self._meet, "size": ends[-1], "wait_s": self._together_s}
        return {reader: common | {"first": first} for reader, first in zip(members, ends[:-1], strict=True)}

    def _meet_anew(self, group: _Reader, size: int, wait_s: float) -> str:
        meet = self._folder / f"weights.{uuid.uuid4().hex}"
        group.join(lambda: ProcessGroup(self._kind, meet, 0, size, wait_s))
        return str(meet)

    def forget(self, reader: str) -> None:
        if (gone := self._readers.pop(reader, None)) is not None:
            gone.end(0.0)
        if reader in self._members:
            self._members = []
            self._all.leave()

    def close(self) -> None:
        for reader in (*self._readers.values(), self._all):
            reader.end(1.0)


class _Reader:
    """The process group of one engine or of several; its thread joins and sends in the order of the calls."""

    def __init__(self, name: str) -> None:
        self._group: ProcessGroup | None = None
        self.lost = False
        """The group has failed, and no other was joined since."""
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, args=(name,), name=f"weights of {name}", daemon=True)
        self._thread.start()

    def join(self, meet: Callable[[], ProcessGroup]) -> None:
        def call() -> None:
            self._leave()
            self._group = meet()

        self.lost = False
        self._calls.put(call)

    def send(self, chunks: Iterable[Tensor], failed: Failed) -> None:
        def call() -> None:
            try:
                if self._group is None:
                    raise RunError("its group has failed before")
                self._group.send(chunks)
            except RunError:
                failed()  # before anything else: a publication may be waiting
                raise

        self._calls.put(call)

    @property
    def idle(self) -> bool:
        """Whether all calls so far are done."""
        return not self._calls.unfinished_tasks

    def leave(self) -> None:
        """Close the group after the calls so far."""
        self._calls.put(self._leave)

    def end(self, wait_s: float) -> None:
        """End the thread after the calls so far; waits for it at most `wait_s`."""
        self._calls.put(None)
        self._thread.join(wait_s)

    def _run(self, name: str) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except RunError as error:  # the reader notices at its own deadline
                log.error("%s: weights do not arrive: %s", name, error)
                self._leave()
                self.lost = True
            finally:
                self._calls.task_done()
        self._leave()

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
