"""A copy of one policy version on the device where it was trained, apart from the parameters in training.

    chunk 0 [ tensor | tensor | tensor ... ]   chunk 1 [ one large tensor ]   chunk 2 ...

The next version is written into the same chunks, so that handles of their memory stay valid; a chunk is sent at once.
The offset of an Entry counts over all chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.errors import RunError
from asyncrl.weights.device.checksum import as_hex, checksum
from asyncrl.weights.local.file import ALIGN, ITEM_BYTES, Entry, digest_of
from asyncrl.weights.protocol import WeightsCorrupt

CHUNK_BYTES = 256 << 20
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
Views = list[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class SnapshotLayout:
    """Where each tensor lies."""

    sizes: tuple[int, ...]
    """Bytes of each chunk that are filled: what a broadcast sends of it."""
    entries: tuple[Entry, ...]

    def views(self, index: int, chunk: Tensor) -> Views:
        """The tensors of `chunk`, which is chunk `index`. Raises WeightsCorrupt for a wrong checksum."""
        base = sum(self.sizes[:index])
        mine = [e for e in self.entries if base <= e.offset < base + self.sizes[index]]
        raw = [chunk[e.offset - base : e.end - base] for e in mine]
        for entry, now in zip(mine, as_hex([checksum(data) for data in raw]), strict=True):
            if now != entry.digest:
                raise WeightsCorrupt(f"the bytes of {entry.name} are not those of its checksum")
        return [(e.name, data.view(DTYPES[e.dtype]).view(e.shape)) for e, data in zip(mine, raw, strict=True)]


class DeviceSnapshot:
    def __init__(self, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._device, self._chunk_bytes = device, chunk_bytes
        self.chunks: list[Tensor] = []
        """Each [bytes], uint8."""
        self.layout = SnapshotLayout((), ())

    def fill(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> str:
        """Copy `tensors`; returns their digest. Raises RunError for values that are not finite."""
        places: list[_Place] = []
        checksums: list[Tensor] = []
        bad: list[Tensor] = []
        filled: dict[int, int] = {}
        chunk, at = 0, 0
        for name, tensor in tensors:
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype not in DTYPES:
                raise ValueError(f"{name} has dtype {dtype}, expected one of {', '.join(DTYPES)}")
            size, room = tensor.nbytes, max(tensor.nbytes, 1)
            if at and at + room > len(self.chunks[chunk]):
                chunk, at = chunk + 1, 0
            self._room(chunk, at + room)
            to = self.chunks[chunk][at : at + size]
            to.copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
            checksums.append(checksum(to))
            if tensor.is_floating_point() and tensor.itemsize > 1:
                bad.append((~torch.isfinite(tensor)).sum().to(self._device))
            else:
                bad.append(torch.zeros((), dtype=torch.int64, device=self._device))
            places.append(_Place(name, dtype, tuple(tensor.shape), chunk, at))
            filled[chunk] = at + room
            at += -(-room // ALIGN) * ALIGN
        if any(wrong := torch.stack(bad).tolist() if bad else []):
            name = next(place.name for place, count in zip(places, wrong, strict=True) if count)
            raise RunError(f"weights of version {version} are not published: {name} holds values that are not finite.")
        del self.chunks[len(filled) :]
        self.layout = _laid_out(tuple(filled.values()), places, as_hex(checksums))
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return digest_of(self.layout.entries)

    def _room(self, chunk: int, size: int) -> None:
        """Allocate the chunk if it is too small; a chunk that holds tensors already has room (see `fill`)."""
        if chunk == len(self.chunks):
            self.chunks.append(torch.empty(0, dtype=torch.uint8, device=self._device))
        if size > len(self.chunks[chunk]):
            self.chunks[chunk] = torch.empty(max(size, self._chunk_bytes), dtype=torch.uint8, device=self._device)

    def filled(self) -> list[Tensor]:
        """What a broadcast sends: of each chunk the bytes that hold tensors, a view of [layout.sizes[i]]."""
        return [chunk[:size] for chunk, size in zip(self.chunks, self.layout.sizes, strict=True)]


class _Place(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    chunk: int
    at: int


def _laid_out(sizes: tuple[int, ...], places: Sequence[_Place], digests: Sequence[str]) -> SnapshotLayout:
    entries = (
        Entry(p.name, p.dtype, p.shape, sum(sizes[: p.chunk]) + p.at, digest)
        for p, digest in zip(places, digests, strict=True)
    )
    return SnapshotLayout(sizes, tuple(entries))


def all_views(layout: SnapshotLayout, chunks: Iterable[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors chunk by chunk, valid until the next chunk is requested. Raises WeightsCorrupt."""
    for index, chunk in enumerate(chunks):
        yield from layout.views(index, chunk)
