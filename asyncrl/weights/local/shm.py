"""Weights through files in shared memory (folder.py), for processes of one host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import torch

from asyncrl.weights.local.file import ALIGN, ITEM_BYTES, MAGIC, Entry, digest_of, pack_index, threads_for
from asyncrl.weights.local.folder import File, Folder, Watch
from asyncrl.weights.local.slots import Slot
from asyncrl.weights.protocol import WeightsVersion

_WORTH_A_THREAD = 1 << 20
"""Bytes of one tensor."""
_DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES}


class ShmPublisher:
    """Publishes into `dir`, of which it is the one writer."""

    def __init__(self, dir: Path, keep: int = 2) -> None:
        self.dir = dir
        self._folder = Folder(dir, keep)

    def publish(self, branch: int, version: int, named: Iterable[tuple[str, torch.Tensor]]) -> WeightsVersion:
        """Write, then rename. Raises RunError naming the folder when its file system is full."""
        slot: Slot | None = None
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


class ShmSubscriber(Watch):
    """A reader of `dir`; any number of them, coming and going."""

    def open(self, verify: bool = True) -> ShmWeights:
        """Map the newest version. `verify` reads every byte once; without it only the index is checked."""
        return self._open(ShmWeights, verify)

    def close(self) -> None:
        """Forgets its maps."""
        self._maps.forget()


class ShmWeights(File):
    """A mapped version. Its tensors are to be read only, and only until `close`: the memory is then used again."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for e in self.entries:
            if e.nbytes == 0:
                yield e.name, torch.empty(e.shape, dtype=_DTYPES[e.dtype])
                continue
            dtype = _DTYPES[e.dtype]
            flat = torch.frombuffer(self.map, dtype=dtype, count=e.nbytes // dtype.itemsize, offset=e.offset)
            yield e.name, flat.view(e.shape)


def _write(slot: Slot, named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The digest of what was written. Tensors are copied and hashed beside each other, two for each thread at most:
    those of a sharded model come one by one, and are never all in memory."""
    entries: list[Entry] = []
    written: list[tuple[Entry, Future[str]]] = []
    slot.write(0, MAGIC)
    offset = len(MAGIC)
    threads = threads_for(slot.size)
    with ThreadPoolExecutor(threads, "weights copy") as pool:
        for name, tensor in named:
            padding = -offset % ALIGN
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype not in _DTYPES:
                raise ValueError(f"{name} has dtype {dtype}, expected one of {', '.join(_DTYPES)}")
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            if not slot.has_room(offset + padding + len(data)):
                wait([hashed for _, hashed in written])  # the map moves
            slot.write(offset, b"\0" * padding)
            offset += padding
            slot.reserve(offset + len(data))
            entry = Entry(name, dtype, tuple(tensor.shape), offset, "")
            if threads == 1 or len(data) < _WORTH_A_THREAD:
                entries.append(replace(entry, digest=slot.put_hashed(offset, data)))
            else:
                if len(written) >= 2 * threads:
                    written[-2 * threads][1].result()
                written.append((entry, pool.submit(slot.put_hashed, offset, data)))
            offset += len(data)
    entries += [replace(entry, digest=hashed.result()) for entry, hashed in written]
    entries.sort(key=lambda e: e.offset)
    end = pack_index(entries, offset)
    slot.write(offset, end)
    slot.finish(offset + len(end))
    return digest_of(entries)
