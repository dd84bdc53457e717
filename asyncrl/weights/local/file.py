"""The file that holds one policy version, without torch: what is in it, where, and with which digest.

    magic | tensor bytes, each aligned to 64 | index (msgpack) | trailer: index offset, length, digest, magic

The index stands at the end so that tensors are written as they come, one at a time.

Digests are XXH3 of 128 bits, which takes less time than reading the bytes does. They find what is torn, cut short,
altered by accident, or of another version. They do not stop a forger: who may write is for the folder's owner, and on
a network for CURVE.
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
"""By name of the dtype, as torch has it."""
_WORTH_THREADS = 32 << 20
"""Bytes."""


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
    """32 hex digits."""
    return xxhash.xxh3_128(data).hexdigest()


def digest_of(entries: Iterable[Entry]) -> str:
    """Over the content alone, in the order of names, so that two writers of equal weights agree."""
    content: list[Any] = sorted([e.name, e.dtype, list(e.shape), e.digest] for e in entries)
    return digest(msgpack.packb(content))


def pack_index(entries: Sequence[Entry], offset: int) -> bytes:
    """Index and trailer of a file whose tensors end at `offset`."""
    index: bytes = msgpack.packb([[e.name, e.dtype, e.shape, e.offset, e.digest] for e in entries])
    return index + TRAILER.pack(offset, len(index), bytes.fromhex(digest(index)), MAGIC)


def read_index(data: Any, where: object) -> tuple[Entry, ...]:
    """Of a whole file, or what can be sliced like one. Raises WeightsCorrupt."""
    if len(data) < len(MAGIC) + TRAILER.size:
        raise WeightsCorrupt(f"{where} has {len(data)} bytes: it is cut short")
    offset, length, expected, magic = TRAILER.unpack(data[-TRAILER.size :])
    if magic != MAGIC or data[: len(MAGIC)] != MAGIC or offset + length + TRAILER.size != len(data):
        raise WeightsCorrupt(f"{where} has no trailer: it was cut short, or is no file of weights")
    index = data[offset : offset + length]
    if digest(index) != expected.hex():
        raise WeightsCorrupt(f"{where}: the index is not that of its digest")
    try:
        said = msgpack.unpackb(index)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WeightsCorrupt(f"{where}: the index cannot be read: {error!r}") from error
    return checked_entries(said, offset, where)


def checked_entries(said: Any, end: int, where: object, begin: int = len(MAGIC)) -> tuple[Entry, ...]:
    """Entries as they stand in an index, of tensors that lie from `begin` to `end`. Raises WeightsCorrupt."""
    entries = []
    try:
        for name, dtype, shape, offset, hexadecimal in said:
            entry = Entry(str(name), str(dtype), tuple(int(n) for n in shape), int(offset), str(hexadecimal))
            if min(entry.shape, default=0) < 0 or entry.offset < begin or entry.end > end:
                raise WeightsCorrupt(f"{where}: the index points outside the file")
            entries.append(entry)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise WeightsCorrupt(f"{where}: the index cannot be read: {error!r}") from error
    return tuple(entries)


def verify(data: Any, entries: Sequence[Entry], where: object) -> None:
    """Reads every byte once, on the cores that this process may use. Raises WeightsCorrupt."""
    whole = memoryview(data)

    def altered(share: Sequence[Entry]) -> str:
        return next((e.name for e in share if digest(whole[e.offset : e.end]) != e.digest), "")

    threads = threads_for(len(whole))
    if threads == 1:
        found = [altered(entries)]
    else:
        with ThreadPoolExecutor(threads, "weights check") as pool:
            found = list(pool.map(altered, _shares(entries, threads)))
    for name in filter(None, found):
        raise WeightsCorrupt(f"{where}: the bytes of {name} are not those of its digest")


def threads_for(size: int) -> int:
    """How many threads so many bytes are worth."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(4, cores) if size >= _WORTH_THREADS else 1


def _shares(entries: Sequence[Entry], count: int) -> list[list[Entry]]:
    """Of about as many bytes each: the largest first, each to the share that has least."""
    shares: list[list[Entry]] = [[] for _ in range(count)]
    sizes = [0] * count
    for entry in sorted(entries, key=lambda e: -e.nbytes):
        least = sizes.index(min(sizes))
        shares[least].append(entry)
        sizes[least] += entry.nbytes
    return shares
