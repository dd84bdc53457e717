"""A trajectory as one block of bytes: a put carries it, the disk stores it, a batch is made of such records.

Layout: number of frames and their lengths as little-endian uint64, then the frames of `wire.encode_trajectory`, each
padded to 8 bytes so that arrays viewed in place are aligned.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from asyncrl.trajectory import Trajectory
from asyncrl.wire import FRAMES_OF_A_ROW, MAX_ROWS, Frame, WireError, decode_trajectory, encode_trajectory

MAX_FRAME_BYTES = 256 << 20
"""A peer that sends the buffer a larger frame is disconnected."""
MAX_RECORD_BYTES = MAX_FRAME_BYTES - 4096
"""A larger record is refused before it is sent; the difference is room for what encryption adds."""
_ALIGN = 8


def to_record(trajectory: Trajectory) -> bytes:
    return join(encode_trajectory(trajectory))


def too_large(trajectory: Trajectory, record: Frame) -> str:
    """Why the buffer cannot take the record of `trajectory`, and the remedy; empty: it can."""
    if len(record) <= MAX_RECORD_BYTES:
        return ""
    kept = sum(row.kept.ids.nbytes for row in trajectory.rows if row.kept is not None)
    return (
        f"the record of {trajectory.id} has {len(record)} bytes, {kept} of them kept ids, expected at most "
        f"{MAX_RECORD_BYTES}: lower actors.top_k or actors.max_kept, or env.max_tokens or env.max_turns"
    )


def join(frames: Sequence[Frame]) -> bytes:
    """The inverse of `split`."""
    parts: list[Frame] = [struct.pack(f"<{len(frames) + 1}Q", len(frames), *map(len, frames))]
    for frame in frames:
        parts.append(frame)
        if len(frame) % _ALIGN:
            parts.append(bytes(-len(frame) % _ALIGN))
    return b"".join(parts)


def from_record(record: Frame) -> Trajectory:
    """The inverse of `to_record`; arrays are read-only views on `record`. Raises WireError."""
    return decode_trajectory(split(record))


def split(record: Frame) -> Sequence[memoryview]:
    """The frames of a record as views. Raises WireError if the lengths do not add up."""
    view = memoryview(record)
    if len(view) < _ALIGN:
        raise WireError(f"record has {len(view)} bytes, expected at least {_ALIGN}")
    (count,) = struct.unpack_from("<Q", view)
    if not 0 < count <= 1 + FRAMES_OF_A_ROW * MAX_ROWS or len(view) < (count + 1) * _ALIGN:
        raise WireError(f"record of {len(view)} bytes claims {count} frames")
    lengths = struct.unpack_from(f"<{count}Q", view, _ALIGN)
    start = (count + 1) * _ALIGN
    frames = []
    for length in lengths:
        frames.append(view[start : start + length])
        start += length + -length % _ALIGN
    if start != len(view):
        raise WireError(f"record has {len(view)} bytes, its lengths add up to {start}")
    return frames
