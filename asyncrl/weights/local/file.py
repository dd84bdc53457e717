"""The file format of one policy version, without torch.

    magic | tensor bytes, each aligned to 64 | index (msgpack) | trailer: index offset, length, digest, magic

The index is at the end, so that tensors are written one at a time, as they come.

Digests are XXH3 of 128 bits, which costs less than reading the bytes. They detect data that is torn, truncated, altered
by accident, or of another version. They do not stop a forger: the folder's permissions do, and on a network CURVE.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgpack
import xxhash

from asyncrl.weights.protocol import WeightsCorrupt

MAGIC = b"asyncrlW"
ALIGN = 64
TRAILER = struct.Struct("<QQ16s8s")
ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1,
    "int64": 8, "int32": 4, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes of one element, by torch's name of the dtype."""
_WORTH_THREADS = 32 << 20
"""Bytes of a file from which on several threads are used."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    digest: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


def digest(data: Any) -> str:
    """The digest of `data`: 32 hex digits."""
    return xxhash.xxh3_128(data).hexdigest()


def digest_of(entries: Iterable[Entry]) -> str:
    """The digest of a version: of the content in the order of names, so that it does not depend on the writer."""
    content: list[Any] = sorted([e.name, e.dtype, list(e.shape), e.digest] for e in entries)
    return digest(msgpack.packb(content))


def pack_index(entries: Sequence[Entry], offset: int) -> bytes:
    """Index and trailer of a file whose tensors end at `offset`."""
    index: bytes = msgpack.packb([[e.name, e.dtype, e.shape, e.offset, e.digest] for e in entries])
    return index + TRAILER.pack(offset, len(index), bytes.fromhex(digest(index)), MAGIC)


def read_index(data: Any, where: object) -> tuple[Entry, ...]:
    """The index of a file, given as bytes or a map. Raises WeightsCorrupt."""
    if len(data) < len(MAGIC) + TRAILER.size:
        raise WeightsCorrupt(f"{where} has {len(data)} bytes: it is truncated")
    offset, length, expected, magic = TRAILER.unpack(data[-TRAILER.size :])
    if magic != MAGIC or data[: len(MAGIC)] != MAGIC or offset + length + TRAILER.size != len(data):
        raise WeightsCorrupt(f"{where} has no trailer: it was truncated, or is not a file of weights")
    index = data[offset : offset + length]
    if digest(index) != expected.hex():
        raise WeightsCorrupt(f"{where}: the index does not match its digest")
    try:
        rows = msgpack.unpackb(index)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WeightsCorrupt(f"{where}: the index cannot be read: {error!r}") from error
    return checked_entries(rows, offset, where)


def checked_entries(rows: Any, end: int, where: object, begin: int = len(MAGIC)) -> tuple[Entry, ...]:
    """The entries of a decoded index, of tensors between `begin` and `end`. Raises WeightsCorrupt."""
    entries = []
    try:
        for name, dtype, shape, offset, hexadecimal in rows:
            entry = Entry(str(name), str(dtype), tuple(int(n) for n in shape), int(offset), str(hexadecimal))
            if min(entry.shape, default=0) < 0 or entry.offset < begin or entry.end > end:
                raise WeightsCorrupt(f"{where}: the index points outside the file")
            entries.append(entry)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise WeightsCorrupt(f"{where}: the index cannot be read: {error!r}") from error
    return tuple(entries)


def verify(data: Any, entries: Sequence[Entry], where: object) -> None:
    """Compare all digests, in parallel if the file is large. Raises WeightsCorrupt."""
    view = memoryview(data)

    def altered(share: Sequence[Entry]) -> str:
        return next((e.name for e in share if digest(view[e.offset : e.end]) != e.digest), "")

    threads = threads_for(len(view))
    if threads == 1:
        names = [altered(entries)]
    else:
        with ThreadPoolExecutor(threads, "weights check") as pool:
            names = list(pool.map(altered, _shares(entries, threads)))
    for name in filter(None, names):
        raise WeightsCorrupt(f"{where}: the bytes of {name} do not match its digest")


def threads_for(size: int) -> int:
    """The number of threads for so many bytes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(4, cores) if size >= _WORTH_THREADS else 1


def _shares(entries: Sequence[Entry], count: int) -> list[list[Entry]]:
    """Shares of about equal size: each entry, largest first, goes to the smallest share."""
    shares: list[list[Entry]] = [[] for _ in range(count)]
    sizes = [0] * count
    for entry in sorted(entries, key=lambda e: -e.nbytes):
        least = sizes.index(min(sizes))
        shares[least].append(entry)
        sizes[least] += entry.nbytes
    return shares
