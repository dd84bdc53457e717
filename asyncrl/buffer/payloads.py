"""The stored trajectories: append-only segment files beside the ledger.

`append` only remembers; `write` puts everything remembered into the current segment with one system call, and the
ledger commits after it. So a row never names bytes that are not in the file, whatever process is killed when. Every
opening begins a new segment: what a killed writer left at the end of the last one is never written over.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import RunError

SEGMENT_BYTES = 64 << 20
_IOV_MAX = 1024


@dataclass(frozen=True, slots=True)
class Location:
    segment: int
    start: int
    bytes: int
    crc: int


class PayloadLost(RunError):
    """Bytes that the ledger names are not in the segment as they were written."""


class Payloads:
    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._segment_bytes = segment_bytes
        self._sizes = {int(path.stem): path.stat().st_size for path in folder.glob("*.segment")}
        self._readers: dict[int, int] = {}
        self._pending: list[bytes] = []
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
        location = Location(self._current, self._end, len(record), zlib.crc32(record))
        self._pending.append(record)
        self._end += len(record)
        return location

    def write(self, flush: bool) -> None:
        """Puts what was appended into the file; with `flush` also onto the disk. Raises OSError (a full disk)."""
        todo: list[bytes | memoryview] = list(self._pending)
        while todo:
            written = os.writev(self._writer, todo[:_IOV_MAX])
            while todo and written >= len(todo[0]):
                written -= len(todo[0])
                del todo[0]
            if written:
                todo[0] = memoryview(todo[0])[written:]
        self._pending.clear()
        self._sizes[self._current] = self._end
        if flush:
            os.fdatasync(self._writer)

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
        if location.segment == self._current and location.start >= self._sizes[self._current]:
            start = self._sizes[self._current]
            for record in self._pending:
                if start == location.start:
                    return record
                start += len(record)
        try:
            if location.segment not in self._readers:
                self._readers[location.segment] = os.open(self.path(location.segment), os.O_RDONLY)
            record = os.pread(self._readers[location.segment], location.bytes, location.start)
        except FileNotFoundError:
            record = b""
        if len(record) != location.bytes or zlib.crc32(record) != location.crc:
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
