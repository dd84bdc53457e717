"""The changes from one policy version to the next, bit for bit.

At the learning rates of post-training a step changes most bfloat16 weights by less than half of a unit in the last
place, so that they keep their value. A delta lists the elements that changed, by the gap to the previous one, and the
integer number of units in the last place that they moved, so that adding them gives the exact bits.

    magic | header length | header (msgpack) | streams

The header holds the index of the new file and, for each block of at most `BLOCK` elements, what its streams are. A
block that changed in most places (as in float32) is dense: a move for every element.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from asyncrl.weights.local.file import ITEM_BYTES, Entry, checked_entries, digest_of, pack_index
from asyncrl.weights.protocol import WeightsCorrupt

MAGIC = b"asyncrlD"
BLOCK = 1 << 22
MAX_HEADER_BYTES = 64 << 20
_SAMPLE = 997
_DENSE = 0.25
_LENGTH = struct.Struct("<I")
_GAP = 255
"""Gaps of so many elements or more are in a separate stream."""
_MOVES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
Flat = npt.NDArray[Any]


class _Block(NamedTuple):
    entry: int
    start: int
    size: int
    """Number of elements."""
    changed: int
    """-1: dense, a move for every element."""
    far: int
    """Gaps of `_GAP` or more."""
    width: int
    """Bytes of a move, 1, 2, 4 or 8."""
    large: int
    """Number of moves that need more bytes."""


def make(old: Any, old_entries: Sequence[Entry], new: Any, new_entries: Sequence[Entry]) -> bytes | None:
    """The delta between two mapped files of weights; None if their tensors or offsets differ."""
    if [_place(e) for e in old_entries] != [_place(e) for e in new_entries]:
        return None
    blocks: list[_Block] = []
    streams: list[bytes] = []
    for i, entry in enumerate(new_entries):
        a, b = _elements(old, entry), _elements(new, entry)
        for start in range(0, len(a), BLOCK):
            before, after = a[start : start + BLOCK], b[start : start + BLOCK]
            where = np.flatnonzero(before != after)
            if len(where):
                blocks.append(_encode(i, start, before, after, where, streams))
    header = msgpack.packb(
        {
            "base": digest_of(old_entries),
            "index": [[e.name, e.dtype, e.shape, e.offset, e.digest] for e in new_entries],
            "blocks": blocks,
        }
    )
    return b"".join([MAGIC, _LENGTH.pack(len(header)), header, *streams])


def worth_making(old: Any, new: Any, entries: Sequence[Entry]) -> bool:
    """Whether few elements changed, judged by a sample: comparing all takes longer than sending them."""
    looked = changed = 0
    for entry in entries:
        a, b = _elements(old, entry)[::_SAMPLE], _elements(new, entry)[::_SAMPLE]
        looked, changed = looked + len(a), changed + int(np.count_nonzero(a != b))
    return changed <= _DENSE * looked


def apply(delta: bytes | memoryview, old: Any, old_entries: Sequence[Entry], to: Any) -> bytes:
    """Write the tensors of the new file into `to`, a writable map with room for them; returns the index that follows.

    The caller verifies the result. Raises WeightsCorrupt if `old` is another base.
    """
    header, offset = _header(delta)
    if header.get("base") != digest_of(old_entries):
        raise WeightsCorrupt(f"the delta is against {header.get('base')}, not against what is held")
    end = max((e.end for e in old_entries), default=len(MAGIC))
    entries = checked_entries(header.get("index"), end, "the delta")
    if [_place(e) for e in entries] != [_place(e) for e in old_entries]:
        raise WeightsCorrupt("the delta is of other tensors than those that are held")
    target = np.frombuffer(to, np.uint8)
    for start in range(0, end, BLOCK):
        np.copyto(target[start : min(start + BLOCK, end)], np.frombuffer(old, np.uint8, min(BLOCK, end - start), start))
    reader = _Streams(memoryview(delta), offset)
    for block in _blocks(header.get("blocks"), entries):
        _decode(block, _elements(to, entries[block.entry])[block.start : block.start + block.size], reader)
    if not reader.at_end:
        raise WeightsCorrupt("the delta has bytes that belong to no block")
    return pack_index(entries, end)


def _place(e: Entry) -> tuple[str, str, tuple[int, ...], int]:
    return e.name, e.dtype, e.shape, e.offset


def _elements(data: Any, entry: Entry) -> Flat:
    """The elements as unsigned integers of their size."""
    kind = _MOVES[ITEM_BYTES[entry.dtype]]
    return np.frombuffer(data, kind, entry.nbytes // np.dtype(kind).itemsize, entry.offset)


def _encode(i: int, start: int, before: Flat, after: Flat, where: npt.NDArray[np.intp], streams: list[bytes]) -> _Block:
    size, item = len(before), before.dtype.itemsize
    dense = 2 * len(where) > size
    moves = _zigzag(after - before if dense else after[where] - before[where])
    costs = {w: len(moves) * w + item * int(np.count_nonzero(moves >= _limit(w))) for w in _MOVES if w < item}
    costs[item] = len(moves) * item
    width = min(costs, key=lambda w: costs[w])
    far = np.zeros(0, np.uint32)
    if not dense:
        gaps = np.diff(where, prepend=-1) - 1
        far = gaps[gaps >= _GAP].astype(np.uint32)
        streams += [np.minimum(gaps, _GAP).astype(np.uint8).tobytes(), far.tobytes()]
    large = moves[moves >= _limit(width)] if width < item else moves[:0]
    kept = np.minimum(moves, _limit(width)) if width < item else moves
    streams += [kept.astype(_MOVES[width]).tobytes(), large.tobytes()]
    return _Block(i, start, size, -1 if dense else len(where), len(far), width, len(large))


def _decode(block: _Block, into: Flat, streams: _Streams) -> None:
    item = into.dtype.itemsize
    count = block.size if block.changed < 0 else block.changed
    where: Any = slice(None)
    if block.changed >= 0:
        gaps = streams.take(np.uint8, count).astype(np.int64)
        _fill(gaps, _GAP, streams.take(np.uint32, block.far))
        where = np.cumsum(gaps + 1) - 1
        if count and where[-1] >= block.size:
            raise WeightsCorrupt("a delta's block names an element outside of it")
    moves = streams.take(_MOVES[block.width], count).astype(into.dtype)
    if block.width < item:
        _fill(moves, _limit(block.width), streams.take(into.dtype.type, block.large))
    elif block.large:
        raise WeightsCorrupt("a delta's block has moves larger than its elements")
    into[where] += _unzigzag(moves)


def _fill(values: Flat, escape: int, large: Flat) -> None:
    escaped = values == escape
    if int(np.count_nonzero(escaped)) != len(large):
        raise WeightsCorrupt("a delta's streams do not belong together")
    values[escaped] = large


def _limit(width: int) -> int:
    """The largest number of `width` bytes, which marks a move in the stream of large moves."""
    return (1 << (8 * width)) - 1


def _zigzag(moves: Flat) -> Flat:
    """Zigzag encoding, 0, -1, 1, -2 ... as 0, 1, 2, 3 ...: small moves of either sign are small numbers."""
    signed = moves.view(f"i{moves.dtype.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * moves.dtype.itemsize - 1))).view(moves.dtype)


def _unzigzag(moves: Flat) -> Flat:
    one = moves.dtype.type(1)
    back: Flat = (moves >> one) ^ (moves.dtype.type(0) - (moves & one))
    return back


class _Streams:
    """Reads a delta piece by piece."""

    def __init__(self, data: memoryview, offset: int) -> None:
        self._data, self._at = data, offset

    @property
    def at_end(self) -> bool:
        return self._at == len(self._data)

    def take(self, kind: Any, count: int) -> Flat:
        size = count * np.dtype(kind).itemsize
        if self._at + size > len(self._data):
            raise WeightsCorrupt("the delta is cut short")
        taken: Flat = np.frombuffer(self._data[self._at : self._at + size], kind)
        self._at += size
        return taken


def _header(delta: bytes | memoryview) -> tuple[dict[str, Any], int]:
    start = len(MAGIC) + _LENGTH.size
    if len(delta) < start or bytes(delta[: len(MAGIC)]) != MAGIC:
        raise WeightsCorrupt("this is not a delta")
    (length,) = _LENGTH.unpack(delta[len(MAGIC) : start])
    if length > MAX_HEADER_BYTES or start + length > len(delta):
        raise WeightsCorrupt("the delta's header is cut short")
    try:
        header = msgpack.unpackb(delta[start : start + length], strict_map_key=True)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WeightsCorrupt(f"the delta's header cannot be read: {error!r}") from error
    if not isinstance(header, dict):
        raise WeightsCorrupt(f"the delta's header is a {type(header).__name__}, expected a mapping")
    return header, start + length


def _blocks(rows: Any, entries: Sequence[Entry]) -> list[_Block]:
    if not isinstance(rows, list):
        raise WeightsCorrupt("the delta has no list of blocks")
    found = []
    for numbers in rows:
        if not isinstance(numbers, list) or len(numbers) != 7 or not all(type(n) is int for n in numbers):
            raise WeightsCorrupt("the delta has a malformed block")
        block = _Block(*numbers)
        if not 0 <= block.entry < len(entries):
            raise WeightsCorrupt("the delta has a block of no tensor")
        item = ITEM_BYTES[entries[block.entry].dtype]
        if (
            not 0 <= block.start <= block.start + block.size <= entries[block.entry].nbytes // item
            or not -1 <= block.changed <= block.size <= BLOCK
            or min(block.far, block.large) < 0
            or block.width not in _MOVES
            or block.width > item
        ):
            raise WeightsCorrupt("the delta has a block that does not fit its tensor")
        found.append(block)
    return found
