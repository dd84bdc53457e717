"""Files in shared memory that are written again and again, so that their pages are mapped once and not each time.

Mapping a page costs more than copying it. A writer takes a file that no reader holds (a lock says so) for the next
version; writer and readers keep it mapped. A reader that came too late finds the file locked, or under another name.
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
"""Bytes that are copied and, while the processor's cache still has them, hashed."""


class Slot:
    """A file to write to. Raises OSError when memory is full: room is reserved before it is touched."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._file).st_size
        self._map = mmap.mmap(self._file, 0) if size else None

    def take(self) -> bool:
        """Whether no reader holds it; then none can until `give`."""
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
        """Into room that was reserved."""
        self.map[offset : offset + len(data)] = data

    @property
    def size(self) -> int:
        return len(self._map) if self._map is not None else 0

    def has_room(self, size: int) -> bool:
        """Whether `reserve` changes nothing. Otherwise the map moves, and nobody may be writing to it."""
        return size <= self.size

    def reserve(self, size: int) -> None:
        """Room for so many bytes."""
        self._room(size)

    def put_hashed(self, offset: int, data: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
        """The digest of `data`, a flat array, copied to `offset`, into room that was reserved. In any thread."""
        hashed = xxhash.xxh3_128()
        if len(data):
            target = np.frombuffer(self.map, np.uint8, len(data), offset)
            for start in range(0, len(data), BLOCK):
                to = target[start : start + BLOCK]
                np.copyto(to, data[start : start + BLOCK])
                hashed.update(to.data)
        return hashed.hexdigest()

    def finish(self, size: int) -> None:
        """The file is exactly so large from now on."""
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
        # Beyond what is needed now, so that a stream of tensors of unknown length remaps seldom.
        size = max(end, have + have // 2, 1 << 16)
        os.posix_fallocate(self._file, have, size - have)
        if self._map is None:
            self._map = mmap.mmap(self._file, size)
        else:
            self._map.resize(size)


class Maps:
    """A reader's maps of the files of one folder, kept for the next version that is written into one."""

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}

    def of(self, file: int, folder: Path) -> mmap.mmap:
        """A private map: writing to it changes nobody else's, and this reader's for good."""
        stat = os.fstat(file)
        with os.scandir(folder) as there:
            linked = {entry.inode() for entry in there}
        # A map of a file that was removed keeps its memory.
        self._maps = {inode: mapped for inode, mapped in self._maps.items() if inode in linked}
        mapped = self._maps.get(stat.st_ino)
        if mapped is None or len(mapped) != stat.st_size:
            mapped = self._maps[stat.st_ino] = mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
        return mapped

    def forget(self) -> None:
        self._maps.clear()


def hold(path: Path) -> int:
    """A file that is not written to until it is let go. Raises FileNotFoundError when it is being, or was, replaced."""
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


def let_go(file: int) -> None:
    with contextlib.suppress(OSError):
        # Closing is not enough: a map has a duplicate of the file, and the lock is common to both.
        fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)
