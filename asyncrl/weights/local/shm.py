"""Weights through files in shared memory (folder.py), for processes of one host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.weights.local.file import ALIGN, ITEM_BYTES, MAGIC, Entry, digest_of, pack_index, threads_for
from asyncrl.weights.local.folder import File, Folder, Watch
from asyncrl.weights.local.reused_files import ReusedFile
from asyncrl.weights.protocol import WeightsVersion

_WORTH_A_THREAD = 1 << 20
"""Bytes of a tensor from which on it is copied in a thread."""
_DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES}


class ShmPublisher:
    """Publishes into `dir`, as its only writer."""

    def __init__(self, dir: Path, keep: int = 2) -> None:
        self.dir = dir
        self._folder = Folder(dir, keep)

    def publish(self, branch: int, version: int, named: Iterable[tuple[str, torch.Tensor]]) -> WeightsVersion:
        """Write, then rename. Raises RunError naming the folder if its file system is full."""
        slot: ReusedFile | None = None
        try:
            slot = self._folder.begin()
            id = WeightsVersion(branch, version, _write(slot, named))
            self._folder.commit(slot, id)
            slot = None
        except OSError as error:
            raise self._folder.error(error, version) from error
        finally:
            if slot is not None:
                slot.remove()
        return id

    def latest(self) -> WeightsVersion | None:
        return ShmSubscriber(self.dir).latest()

    def pin(self, version: tuple[int, int]) -> bool:
        return self._folder.pin(version)

    def unpin(self) -> None:
        self._folder.unpin()


class ShmSubscriber(Watch):
    """A reader of `dir`; there may be any number of them."""

    def open(self, verify: bool = True, version: tuple[int, int] | None = None) -> ShmWeights:
        """Map the newest version, or the pinned one. `verify` reads every byte once; without it only the index is
        checked."""
        return self._open(ShmWeights, verify, version)

    def close(self) -> None:
        """Drop the maps."""
        self._maps.forget()


class ShmWeights(File):
    """A mapped version. Its tensors may only be read, and only until `close`: then the memory is reused."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for e in self.entries:
            if e.nbytes == 0:
                yield e.name, torch.empty(e.shape, dtype=_DTYPES[e.dtype])
                continue
            dtype = _DTYPES[e.dtype]
            flat = torch.frombuffer(self.map, dtype=dtype, count=e.nbytes // dtype.itemsize, offset=e.offset)
            yield e.name, flat.view(e.shape)


def _write(slot: ReusedFile, named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Write the tensors, index and trailer; returns the digest.

    Tensors are copied and hashed in parallel, at most two per thread: those of a sharded model come one by one, and are
    never all in memory.
    """
    slot.write(0, MAGIC)
    offset = len(MAGIC)
    with _Copies(slot) as copies:
        for name, tensor in named:
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype not in _DTYPES:
                raise ValueError(f"{name} has dtype {dtype}, expected one of {', '.join(_DTYPES)}")
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            start = offset + -offset % ALIGN
            copies.make_room(start + len(data))
            slot.put(offset, memoryview(bytes(start - offset)))
            copies.add(Entry(name, dtype, tuple(tensor.shape), start, ""), data)
            offset = start + len(data)
    entries = copies.entries()
    end = pack_index(entries, offset)
    slot.write(offset, end)
    slot.finish(offset + len(end))
    return digest_of(entries)


class _Copies:
    """Copies tensors into a slot: small ones at once, large ones in threads."""

    def __init__(self, slot: ReusedFile) -> None:
        self._slot = slot
        self._threads = threads_for(slot.size)
        self._pool = ThreadPoolExecutor(self._threads, "weights copy")
        self._small: list[Entry] = []
        self._large: list[tuple[Entry, Future[str]]] = []

    def __enter__(self) -> _Copies:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def make_room(self, size: int) -> None:
        if not self._slot.has_room(size):
            wait([copied for _, copied in self._large])  # the map moves
            self._slot.reserve(size)

    def add(self, entry: Entry, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        if self._threads == 1 or len(data) < _WORTH_A_THREAD:
            self._small.append(replace(entry, digest=self._slot.put_hashed(entry.offset, data)))
            return
        if len(self._large) >= 2 * self._threads:
            self._large[-2 * self._threads][1].result()
        self._large.append((entry, self._pool.submit(self._slot.put_hashed, entry.offset, data)))

    def entries(self) -> list[Entry]:
        """Entries of all tensors, with their digests, in the order of the file."""
        large = [replace(entry, digest=copied.result()) for entry, copied in self._large]
        return sorted([*self._small, *large], key=lambda entry: entry.offset)
