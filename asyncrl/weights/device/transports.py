"""How the bytes of a snapshot reach an engine: it maps the learner's memory, or its processes get a broadcast."""

from __future__ import annotations

import logging
import queue
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from asyncrl.errors import RunError
from asyncrl.weights.device.cuda_ipc import export
from asyncrl.weights.device.process_group import ProcessGroup
from asyncrl.weights.device.snapshot import DeviceSnapshot
from asyncrl.wire import WireError

log = logging.getLogger(__name__)

Failed = Callable[[], None]
JOIN_S = 60.0
"""Seconds in which the processes of an engine meet the learner, and in which a chunk must have arrived."""


class Transport(Protocol):
    def describe(self, snapshot: DeviceSnapshot) -> Mapping[str, Any]:
        """What a reader must know besides the layout."""
        ...

    def join(self, reader: str, ranks: int) -> Mapping[str, Any]:
        """Where `ranks` processes of the reader meet the learner. Raises WireError."""
        ...

    def send(self, reader: str, snapshot: DeviceSnapshot, failed: Failed) -> None:
        """Send to the processes that joined; returns at once. Raises WireError. `failed` is called, in another thread,
        as soon as it is known that they do not get all of it."""
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

    def send(self, reader: str, snapshot: DeviceSnapshot, failed: Failed) -> None:
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
    """Each reader has a process group and a thread. `folder`, visible to all, is where they meet."""

    def __init__(self, kind: str, folder: Path, wait_s: float = JOIN_S) -> None:
        self._kind, self._folder, self._wait_s = kind, folder, wait_s
        self._readers: dict[str, _Reader] = {}

    def describe(self, snapshot: DeviceSnapshot) -> Mapping[str, Any]:
        return {"handles": []}

    def join(self, reader: str, ranks: int) -> Mapping[str, Any]:
        meet = self._folder / f"weights.{uuid.uuid4().hex}"
        if reader not in self._readers:
            self._readers[reader] = _Reader(reader)
        self._readers[reader].join(lambda: ProcessGroup(self._kind, meet, 0, 1 + ranks, self._wait_s))
        return {"kind": self._kind, "meet": str(meet), "size": 1 + ranks, "wait_s": self._wait_s}

    def send(self, reader: str, snapshot: DeviceSnapshot, failed: Failed) -> None:
        if reader not in self._readers:
            raise WireError(f"{reader} asks for weights without having joined")
        self._readers[reader].send(list(snapshot.chunks), failed)

    def forget(self, reader: str) -> None:
        if (gone := self._readers.pop(reader, None)) is not None:
            gone.end(0.0)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.end(1.0)


class _Reader:
    """The process group of one engine; its thread joins and sends in the order of the calls."""

    def __init__(self, name: str) -> None:
        self._group: ProcessGroup | None = None
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(name,), name=f"weights of {name}", daemon=True)
        self._thread.start()

    def join(self, meet: Callable[[], ProcessGroup]) -> None:
        def call() -> None:
            self._leave()
            self._group = meet()

        self._calls.put(call)

    def send(self, chunks: list[Tensor], failed: Failed) -> None:
        def call() -> None:
            try:
                if self._group is None:
                    raise RunError("its group has failed before")
                self._group.send(chunks)
            except RunError:
                failed()  # before anything else: a publication may be waiting
                raise

        self._calls.put(call)

    def end(self, wait_s: float) -> None:
        """End the thread after the calls so far; waits for it at most `wait_s`."""
        self._calls.put(None)
        self._thread.join(wait_s)

    def _run(self, name: str) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except RunError as error:  # the reader notices at its own deadline
                log.error("%s does not get its weights: %s", name, error)
                self._leave()
        self._leave()

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
