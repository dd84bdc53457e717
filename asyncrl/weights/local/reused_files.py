"""Files in shared memory that are reused, so that their pages are mapped once and not for every version.

Mapping a page costs more than copying it. A writer takes a file that no reader holds (a lock says so) for the next
version; writer and readers keep it mapped. A reader that comes too late finds the file locked or renamed.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

BLOCK = 1 << 18
"""Bytes that are copied, then hashed while they are in the processor's cache."""


class ReusedFile:
    """A file to write a version into. Raises OSError if memory is full: room is reserved before it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._file).st_size
        self._map = mmap.mmap(self._file, 0) if size else None

    def take(self) -> bool:
        """Lock the file, if no reader holds it; then none can until `give`. Returns whether that succeeded."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def give(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def rename(self, path: Path) -> None:
        os.replace(self.path, path)
        self.path = path

    def write(self, offset: int, data: bytes) -> None:
        self._room(offset + len(data))
        self.map[offset : offset + len(data)] = data

    def put(self, offset: int, data: memoryview) -> None:
        """Write into reserved room."""
        self.map[offset : offset + len(data)] = data

    @property
    def size(self) -> int:
        return len(self._map) if self._map is not None else 0

    def has_room(self, size: int) -> bool:
        """Whether `reserve` would change nothing. Otherwise the map moves, and no thread may be writing to it."""
        return size <= self.size

    def reserve(self, size: int) -> None:
        """Reserve room for so many bytes."""
        self._room(size)

    def put_hashed(self, offset: int, data: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
        """Copy `data`, a flat array, into reserved room at `offset`; returns its digest. Any thread may call it."""
        hashed = xxhash.xxh3_128()
        if len(data):
            target = np.frombuffer(self.map, np.uint8, len(data), offset)
            for start in range(0, len(data), BLOCK):
                to = target[start : start + BLOCK]
                np.copyto(to, data[start : start + BLOCK])
                hashed.update(to.data)
        return hashed.hexdigest()

    def finish(self, size: int) -> None:
        """Set the final size of the file."""
        if self._map is not None and len(self._map) != size:
            self._map.resize(size)

    @property
    def map(self) -> mmap.mmap:
        assert self._map is not None
        return self._map

    def close(self) -> None:
        self._map = None
        os.close(self._file)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self.close()

    def _room(self, end: int) -> None:
        have = self.size
        if end <= have:
            return
        # More than is needed now, so that a stream of tensors of unknown length remaps seldom.
        size = max(end, have + have // 2, 1 << 16)
        os.posix_fallocate(self._file, have, size - have)
        if self._map is None:
            self._map = mmap.mmap(self._file, size)
        else:
            self._map.resize(size)


class Maps:
    """A reader's maps of the files of one folder, kept for later versions in the same files."""

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}

    def of(self, file: int, folder: Path) -> mmap.mmap:
        """A private map: writing to it changes only this reader's copy."""
        stat = os.fstat(file)
        with os.scandir(folder) as there:
            linked = {entry.inode() for entry in there}
        # Maps of removed files would keep their memory.
        self._maps = {inode: mapped for inode, mapped in self._maps.items() if inode in linked}
        mapped = self._maps.get(stat.st_ino)
        if mapped is None or len(mapped) != stat.st_size:
            mapped = self._maps[stat.st_ino] = mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
        return mapped

    def forget(self) -> None:
        self._maps.clear()


def hold(path: Path) -> int:
    """Open and lock a file, so that nobody rewrites it until `release`. Raises FileNotFoundError if replaced."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.stat(path).st_ino != os.fstat(file).st_ino:
            raise FileNotFoundError(path)
    except BaseException as error:
        os.close(file)
        if isinstance(error, BlockingIOError):
            raise FileNotFoundError(path) from error
        raise
    return file


def release(file: int) -> None:
    with contextlib.suppress(OSError):
        # Closing is not enough: a map has a duplicate of the descriptor, which shares the lock.
        fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)
