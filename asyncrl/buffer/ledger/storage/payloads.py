"""The stored trajectories: append-only segment files beside the ledger.

`append` keeps a record in memory and a thread writes it; `write` waits until all are in the current segment, and the
ledger commits after it. A row therefore never names bytes that are not in the file, whichever process is killed.
Every opening begins a new segment, so that the end of the last one, which a killed writer may have left, is never
overwritten. A power cut can affect the last two segments only: the thread flushes a full one before a third begins.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from asyncrl.errors import RunError
from asyncrl.wire import Frame

SEGMENT_BYTES = 64 << 20
_IOV_MAX = 1024
_AHEAD_BYTES = 1 << 20
_UNFLUSHED = 3
"""Segments at the end that may not be on the disk: the current one, and two that were ended and wait for it."""
_OPEN = 64
"""Segments held open for reading; under `buffer.keep: all` a run has any number of them."""


@dataclass(frozen=True, slots=True)
class Location:
    segment: int
    start: int
    bytes: int
    checksum: int


def checksum(record: Frame) -> int:
    """XXH3 of a stored record, 63 bits: SQLite's integers are signed."""
    return xxhash.xxh3_64_intdigest(record) >> 1


class PayloadLost(RunError):
    """Bytes that the ledger names are not in the segment as they were written."""


class Payloads:
    """With `flush` every `write` will flush, so the disk begins early with what is written before it."""

    def __init__(
        self, folder: Path, segment_bytes: int = SEGMENT_BYTES, flush: bool = False, settle: bool = False
    ) -> None:
        """`settle`: brings to the disk what a process before this one has written and, killed, has not flushed."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._segment_bytes = segment_bytes
        self._begin_flush = flush
        self._sizes = {int(path.stem): path.stat().st_size for path in folder.glob("*.segment")}
        if settle:
            for segment in sorted(self._sizes)[-_UNFLUSHED:]:
                _flush_path(folder / f"{segment:08d}.segment")
        self._readers: dict[int, int] = {}
        self._thread = ThreadPoolExecutor(1, "payloads")
        """One thread: it writes and flushes in order."""
        self._pending: dict[int, Frame] = {}
        """Records that no `write` has finished yet, by their start."""
        self._unsent: list[Frame] = []
        self._unsent_bytes = 0
        self._writing: list[Future[None]] = []
        self._ending: Future[None] | None = None
        """Done when the segment before the current one is on the disk."""
        self._current = max(self._sizes, default=-1) + 1
        self._writer = self._open()
        self._end = 0
        _flush_path(folder)

    @property
    def disk_bytes(self) -> int:
        return sum(self._sizes.values())

    @property
    def bytes(self) -> int:
        """Those on the disk, and those that the next `write` brings."""
        return self.disk_bytes + self._end - self._sizes[self._current]

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

    def append(self, record: Frame) -> Location:
        location = Location(self._current, self._end, len(record), checksum(record))
        self._pending[self._end] = record
        self._unsent.append(record)
        self._unsent_bytes += len(record)
        self._end += len(record)
        if self._unsent_bytes >= _AHEAD_BYTES:
            self._send()
        return location

    def write(self, flush: bool) -> None:
        """Returns when all records are in the file, with `flush` on the disk. Raises OSError (a full disk)."""
        if self._writing:
            self._send()
            for written in self._writing:
                written.result()
            self._writing.clear()
        else:  # so little that waiting for a thread would cost more
            _write(self._writer, self._unsent, False)
            self._unsent, self._unsent_bytes = [], 0
        self._pending.clear()
        self._sizes[self._current] = self._end
        if self._ending is not None and (flush or self._ending.done()):
            self._ending.result()
            self._ending = None
        if flush:
            os.fdatasync(self._writer)

    def flush(self, then: Callable[[], None]) -> Future[None]:
        """Flushes what is in the files now and calls `then`, both in the thread."""
        return self._thread.submit(_flush, self._writer, then)

    def _send(self) -> None:
        self._writing.append(self._thread.submit(_write, self._writer, self._unsent, self._begin_flush))
        self._unsent, self._unsent_bytes = [], 0

    def rotate_if_full(self) -> None:
        """Begins a new segment if the current one has its full size. Called between two writes."""
        if self._end >= self._segment_bytes:
            self._rotate()

    def seal(self) -> None:
        """Ends and flushes the current segment, so that it can be linked into a checkpoint."""
        if self._end:
            self._rotate().result()

    def read(self, location: Location) -> Frame:
        """Raises PayloadLost if the bytes are missing or differ from what was written."""
        if location.segment == self._current and location.start in self._pending:
            return self._pending[location.start]
        record: Frame
        try:
            if location.segment not in self._readers:
                if len(self._readers) >= _OPEN:
                    os.close(self._readers.pop(next(iter(self._readers))))
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

    def _rotate(self) -> Future[None]:
        if self._ending is not None:
            self._ending.result()
        full = self._writer
        self._current += 1
        self._writer = self._open()
        self._end = 0
        self._ending = self._thread.submit(_finish, full, self.folder)
        return self._ending

    def _open(self) -> int:
        self._sizes[self._current] = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        return os.open(self.path(self._current), flags, 0o600)


def _write(file: int, records: Sequence[Frame], begin_flush: bool) -> None:
    todo: list[Frame] = list(records)
    start = os.lseek(file, 0, os.SEEK_END)
    while todo:
        written = os.writev(file, todo[:_IOV_MAX])
        while todo and written >= len(todo[0]):
            written -= len(todo[0])
            del todo[0]
        if written:
            todo[0] = memoryview(todo[0])[written:]
    if begin_flush:
        # Returns at once. An fdatasync for each part would make the disk half as fast.
        os.posix_fadvise(file, start, 0, os.POSIX_FADV_DONTNEED)


def _flush(file: int, then: Callable[[], None]) -> None:
    os.fdatasync(file)
    then()


def _finish(file: int, folder: Path) -> None:
    os.fdatasync(file)  # no later flush would reach it
    os.close(file)
    _flush_path(folder)


def _flush_path(path: Path) -> None:
    """Flushes a file, or a folder: that makes the names of its files durable, which no flush of their contents does."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
