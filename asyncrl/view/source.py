"""Where the rows and trajectories of a viewed run come from: its ledger when it is over, its buffer while it lives."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from asyncrl.buffer.client import BufferClient
from asyncrl.buffer.client.errors import BufferRefused, BufferTimeout
from asyncrl.buffer.client.pages import Page
from asyncrl.buffer.ledger.pages import Pages
from asyncrl.buffer.ledger.storage.payloads import checksum
from asyncrl.buffer.record import from_record
from asyncrl.errors import RunError
from asyncrl.launch.preflight import living
from asyncrl.run_folder import RunFolder
from asyncrl.sockets import Endpoint
from asyncrl.trajectory import Trajectory
from asyncrl.wire import WireError

ANSWER_S = 5.0
"""Seconds that the buffer of a live run has for an answer."""
T = TypeVar("T")
_BUSY_S = 0.2
"""Pause after a request that the buffer refused as one too many."""


class Unavailable(RunError):
    """Something of the run cannot be shown now; says why."""


class Source(Protocol):
    live: bool

    def page(self, group: int, batch: int) -> Page:
        """Groups from a number on, batches from a serial on. Raises Unavailable."""
        ...

    def record(self, group: int, index: int) -> Trajectory | None:
        """None: its payload is not kept. Raises Unavailable, also for a damaged one."""
        ...

    def close(self) -> None: ...


class Finished:
    """Reads the ledger and the payloads of a run that is over. Nothing is written, no file locked."""

    live = False

    def __init__(self, folder: Path) -> None:
        """`folder`: of the ledger. Raises RunError."""
        # Without a write-ahead log nothing has to be read but the file, which may lie on a read-only disk.
        path = folder / "ledger.sqlite"
        self._pages = Pages(path, immutable=not path.with_name("ledger.sqlite-wal").exists())
        self._payloads = folder / "payloads"

    def page(self, group: int, batch: int) -> Page:
        return self._pages.page(group, batch)

    def record(self, group: int, index: int) -> Trajectory | None:
        location = self._pages.location(group, index)
        if location is None:
            return None
        path = self._payloads / f"{location.segment:08d}.segment"
        try:
            with path.open("rb") as file:
                record = os.pread(file.fileno(), location.bytes, location.start)
        except OSError as error:
            raise Unavailable(f"the payload of {group}.{index} cannot be read: {path}: {error.strerror}.") from error
        if len(record) != location.bytes or checksum(record) != location.checksum:
            raise Unavailable(f"the payload of {group}.{index} is damaged: {path} was cut or changed.")
        try:
            return from_record(record)
        except WireError as error:
            raise Unavailable(f"the payload of {group}.{index} cannot be decoded: {error}.") from error

    def close(self) -> None:
        self._pages.close()


class Live:
    """Asks the buffer of a live run. One thread at a time."""

    live = True

    def __init__(self, address: Endpoint | str) -> None:
        self._client = BufferClient(address, identity=f"view-{os.getpid()}-{time.monotonic_ns()}", deadline_s=ANSWER_S)

    def page(self, group: int, batch: int) -> Page:
        return _patient(lambda: self._client.page(group, batch))

    def record(self, group: int, index: int) -> Trajectory | None:
        return _patient(lambda: self._client.record(group, index))

    def close(self) -> None:
        self._client.close()


def _patient(ask: Callable[[], T]) -> T:
    """The answer, asked again while other readers are in the way. Raises Unavailable."""
    deadline = time.monotonic() + ANSWER_S
    while True:
        try:
            return ask()
        except BufferRefused as error:
            if error.code != "busy" or time.monotonic() > deadline:
                raise Unavailable(str(error)) from error
            time.sleep(_BUSY_S)
        except (BufferTimeout, WireError) as error:
            raise Unavailable(f"the buffer of the live run does not answer: {error}") from error


def open_source(run: RunFolder) -> Source:
    """A run is over when nobody lives who writes its ledger, or will again: neither its buffer, nor the launcher that
    starts a crashed buffer again.

    Raises RunError for a run whose ledger is missing, damaged or of another version, and for one that may live on
    another host, whose processes cannot be seen here."""
    alive = living(run).values()
    if "buffer" in alive or ("launcher" in alive and not run.ended):
        return Live(run.address("buffer"))
    if run.copied_from is None and not run.ended:
        _refuse_elsewhere(run)
    return Finished(run.ledger(run.load_config()))


def _refuse_elsewhere(run: RunFolder) -> None:
    record = run.record()
    host = record.get("launched_on", "that it was launched on")
    if record.get("host") and host != platform.node():
        raise RunError(
            f"{run.path} left no summary, so it may still live on the host {host}: a live run is viewed on its own "
            "host, and its files are not read while it writes them. If its launcher was killed, --resume it, or view "
            "a copy of the folder."
        )
