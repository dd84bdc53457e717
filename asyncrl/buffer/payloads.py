"""The stored trajectories: append-only segment files beside the ledger.

`append` remembers, and a thread writes what was remembered while the buffer goes on; `write` waits until all of it is
in the current segment, and the ledger commits after it. So a row never names bytes that are not in the file, whatever
process is killed when. Every opening begins a new segment: what a killed writer left at the end of the last one is
never written over.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from asyncrl.errors import RunError

SEGMENT_BYTES = 64 << 20
_IOV_MAX = 1024
_AHEAD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Location:
    segment: int
    start: int
    bytes: int
    checksum: int


def checksum(record: bytes) -> int:
    """XXH3 of a stored record, 63 bits: SQLite's integers are signed."""
    return xxhash.xxh3_64_intdigest(record) >> 1


class PayloadLost(RunError):
    """Bytes that the ledger names are not in the segment as they were written."""


class Payloads:
    """`flush`: what is written ahead of a commit goes onto the disk at once, so that the commit waits for less."""

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES, flush: bool = False) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._segment_bytes = segment_bytes
        self._sizes = {int(path.stem): path.stat().st_size for path in folder.glob("*.segment")}
        self._readers: dict[int, int] = {}
        self._flush_ahead = flush
        self._thread = ThreadPoolExecutor(1, "payloads")
        self._pending: dict[int, bytes] = {}
        """By its start: what no `write` has finished."""
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._writing: list[Future[None]] = []
        self._current = max(self._sizes, default=-1)
        self._writer = -1
        self._end = 0
        self._rotate()

    @property
    def disk_bytes(self) -> int:
        return sum(self._sizes.values())

    @property
    def segments(self) -> set[int]:
        return set(self._sizes)

    @property
    def current(self) -> int:
        """The segment that is being written."""
        return self._current

    def size(self, segment: int) -> int:
        """Bytes in a segment; 0 when there is no such file."""
        return self._sizes.get(segment, 0)

    def path(self, segment: int) -> Path:
        return self.folder / f"{segment:08d}.segment"

    def append(self, record: bytes) -> Location:
        location = Location(self._current, self._end, len(record), checksum(record))
        self._pending[self._end] = record
        self._unsent.append(record)
        self._unsent_bytes += len(record)
        self._end += len(record)
        if self._unsent_bytes >= _AHEAD_BYTES:
            self._send(self._flush_ahead)
        return location

    def write(self, flush: bool) -> None:
        """Returns when what was appended is in the file; with `flush` on the disk. Raises OSError (a full disk)."""
        if self._writing:
            self._send(flush)
            for written in self._writing:
                written.result()
            self._writing.clear()
        else:  # little enough that waiting for a thread would cost more
            _write(self._writer, self._unsent, flush)
            self._unsent, self._unsent_bytes = [], 0
        self._pending.clear()
        self._sizes[self._current] = self._end

    def _send(self, flush: bool) -> None:
        self._writing.append(self._thread.submit(_write, self._writer, self._unsent, flush))
        self._unsent, self._unsent_bytes = [], 0

    def rotate_if_full(self) -> None:
        """Between two writes: goes on in a new file once the current one has its size."""
        if self._end >= self._segment_bytes:
            self._rotate()

    def seal(self) -> None:
        """The current segment ends here, so that it can be linked into a checkpoint."""
        if self._end:
            self._rotate()

    def read(self, location: Location) -> bytes:
        """Raises PayloadLost when the bytes are missing or not those that were written."""
        if location.segment == self._current and location.start in self._pending:
            return self._pending[location.start]
        try:
            if location.segment not in self._readers:
                self._readers[location.segment] = os.open(self.path(location.segment), os.O_RDONLY)
            record = os.pread(self._readers[location.segment], location.bytes, location.start)
        except FileNotFoundError:
            record = b""
        if len(record) != location.bytes or checksum(record) != location.checksum:
            raise PayloadLost(
                f"{self.path(location.segment)} does not hold the {location.bytes} bytes written at {location.start}: "
                "the file was cut or changed. Restore buffer/ from the last checkpoint."
            )
        return record

    def remove(self, segment: int) -> None:
        if segment == self._current:
            raise ValueError(f"segment {segment} is being written")
        reader = self._readers.pop(segment, None)
        if reader is not None:
            os.close(reader)
        self.path(segment).unlink(missing_ok=True)
        self._sizes.pop(segment, None)

    def close(self) -> None:
        self._thread.shutdown()
        for fd in (self._writer, *self._readers.values()):
            os.close(fd)
        self._readers.clear()
        if self._end == 0:
            self.path(self._current).unlink(missing_ok=True)

    def _rotate(self) -> None:
        if self._writer >= 0:
            os.fdatasync(self._writer)  # no later flush would reach it
            os.close(self._writer)
        self._current += 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._writer = os.open(self.path(self._current), flags, 0o600)
        self._end = 0
        self._sizes[self._current] = 0
        folder = os.open(self.folder, os.O_RDONLY)
        os.fsync(folder)  # a file whose name a power cut takes was flushed in vain
        os.close(folder)


def _write(file: int, records: Sequence[bytes], flush: bool) -> None:
    todo: list[bytes | memoryview] = list(records)
    while todo:
        written = os.writev(file, todo[:_IOV_MAX])
        while todo and written >= len(todo[0]):
            written -= len(todo[0])
            del todo[0]
        if written:
            todo[0] = memoryview(todo[0])[written:]
    if flush:
        os.fdatasync(file)
