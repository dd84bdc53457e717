"""A record as ZeroMQ frames: one msgpack header, then the raw array buffers. Decoding copies nothing.

Nothing is unpickled. Every message is checked before use (lengths, dtypes, ranges, finite numbers), and a malformed one
raises `WireError` naming the field, so that the receiver can refuse it and continue.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgpack
import msgspec
import numpy as np

from asyncrl.trajectory import (
    CONTEXT,
    MAX_HINT,
    MAX_PARTS,
    MAX_TURNS_RECORDED,
    Attempt,
    Branch,
    GroupIndex,
    GroupNumber,
    Int32,
    Kind,
    LogHead,
    Row,
    StopReason,
    TicketId,
    Trajectory,
    TurnRecord,
    TurnReward,
)
from asyncrl.trajectory.kept_ids import KeptIds

Frame = bytes | memoryview

MAX_HEADER_BYTES = 4 << 20
MAX_TRAJECTORY_HEADER_BYTES = 16 << 20
"""The same for a trajectory with as many turns as are recorded, and a state key at each."""
MAX_ROWS = 4096
FRAMES_OF_A_ROW = 6
"""At most; without kept ids, those of `_ARRAYS`."""
_ARRAYS = (("token_ids", np.int32), ("mask", np.bool_), ("logprobs", np.float32), ("versions", np.int32))
_DTYPE_OF: dict[str, np.dtype[Any]] = {name: np.dtype(dtype) for name, dtype in _ARRAYS}
_DTYPES = [*_DTYPE_OF.values()]
_PLAIN = len(_ARRAYS)
_SIZES = [dtype.itemsize for dtype in _DTYPES]
_OF_KEPT: tuple[np.dtype[Any], ...] = (np.dtype(np.uint16), np.dtype(np.int32))
"""Types of the two arrays of kept ids, which follow a row's own under truncated sampling."""
_LEAST = np.finfo(np.float32).min


class WireError(ValueError):
    """A malformed message."""


_Turns = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""Largest number in a record: the ledger sums them over a run, and SQLite refuses sums above 63 bits."""
MAX_TEXT = 1024
"""Characters of a name in a record."""
_Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
_Reward = Annotated[float, msgspec.Meta(ge=-1e20, le=1e20)]
"""The sum over an episode; `env.max_reward` allows 1e15 for one of them. What is computed from it stays finite."""
_Numbers = Annotated[dict[str, float], msgspec.Meta(max_length=MAX_PARTS)]
_Length = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]


class _Header(msgspec.Struct, frozen=True):
    """The header of a trajectory, decoded and checked in one pass, since the buffer does it for every trajectory."""

    id: tuple[Branch, GroupNumber, GroupIndex]
    attempt: Attempt
    kind: Kind
    actor: _Text
    task_id: _Text
    env: _Text
    lengths: Annotated[list[_Length], msgspec.Meta(min_length=1, max_length=MAX_ROWS)]
    reward: _Reward
    rewards: _Numbers
    turns: _Turns
    stop_reason: StopReason
    timings: _Numbers
    metrics: _Numbers
    turn_records: Annotated[tuple[TurnRecord, ...], msgspec.Meta(max_length=MAX_TURNS_RECORDED)] = ()
    logged: LogHead | None = None
    turn_rewards: Annotated[tuple[TurnReward, ...], msgspec.Meta(max_length=MAX_TURNS_RECORDED)] = ()
    kept: bool = False
    """Every row has its kept ids, in two more frames."""
    hint: Annotated[str, msgspec.Meta(max_length=MAX_HINT)] = ""


_HEADERS = msgspec.msgpack.Decoder(_Header)


def pack(header: Mapping[str, Any]) -> bytes:
    packed: bytes = msgpack.packb(header, use_bin_type=True)
    return packed


def unpack(frame: Frame, max_bytes: int = MAX_HEADER_BYTES) -> dict[str, Any]:
    """A decoded header. Raises WireError if it is too large, not msgpack, or not a mapping with string keys."""
    _check_size(frame, max_bytes)
    try:
        header = msgpack.unpackb(frame, raw=False, strict_map_key=True)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"header is not msgpack: {type(error).__name__}: {error}") from error
    if not isinstance(header, dict):
        raise WireError(f"header is a {type(header).__name__}, expected a mapping")
    return header


def encode_trajectory(t: Trajectory) -> list[Frame]:
    """The frames: [header, then for each row: token_ids, mask, logprobs, versions, and its kept ids, if it has any].
    Raises ValueError if some rows have kept ids and others none."""
    header = _header(t)
    packed = pack(header | {"turn_rewards": _turn_rewards(t, parts=True)})
    if len(packed) > MAX_TRAJECTORY_HEADER_BYTES:  # an episode is not lost for the parts of its turns' rewards
        packed = pack(header | {"turn_rewards": _turn_rewards(t, parts=False)})
    return [packed, *(frame for row in t.rows for frame in encode_row(row))]


def _header(t: Trajectory) -> dict[str, Any]:
    """All of the header but the turns' rewards."""
    header: dict[str, Any] = {
        "id": [t.id.branch, t.id.group, t.id.index],
        "attempt": t.attempt,
        "kind": t.kind,
        "actor": t.actor,
        "task_id": t.task_id,
        "env": t.env,
        "lengths": [len(row) for row in t.rows],
        "reward": float(t.reward),
        "rewards": {k: float(v) for k, v in t.rewards.items()},
        "turns": t.turns,
        "stop_reason": t.stop_reason,
        "timings": {k: float(v) for k, v in t.timings.items()},
        "metrics": {k: float(v) for k, v in t.metrics.items()},
    }
    if len(t.turn_records) <= MAX_TURNS_RECORDED:  # an episode is not lost for what was measured about it
        header["turn_records"] = [msgspec.structs.astuple(record) for record in t.turn_records]
    if t.logged is not None:
        header["logged"] = msgspec.structs.astuple(t.logged)
    if any(row.kept is not None for row in t.rows):
        if any(row.kept is None for row in t.rows):
            raise ValueError(f"trajectory {t.id}: some rows have kept ids and others none; expected all, or none")
        header["kept"] = True
    if t.hint:
        header["hint"] = t.hint
    return header


def _turn_rewards(t: Trajectory, *, parts: bool) -> list[tuple[Any, ...]]:
    if len(t.turn_rewards) > MAX_TURNS_RECORDED:
        return []
    return [
        (
            float(turn.reward),
            [(span.row, span.start, span.tokens) for span in turn.spans],
            turn.state,
            {name: float(value) for name, value in turn.rewards.items()} if parts else {},
        )
        for turn in t.turn_rewards
    ]


def encode_row(row: Row) -> list[Frame]:
    """The frames of a row: [token_ids, mask, logprobs, versions], and [counts, ids] of kept ids, if it has any."""
    frames: list[Frame] = [_bytes(getattr(row, name), dtype) for name, dtype in _DTYPE_OF.items()]
    if row.kept is not None:
        frames += [_bytes(x, dtype) for x, dtype in zip((row.kept.counts, row.kept.ids), _OF_KEPT, strict=True)]
    return frames


def decode_trajectory(frames: Sequence[Frame]) -> Trajectory:
    """The inverse of `encode_trajectory`; arrays are read-only views on the frames. Raises WireError."""
    if not frames:
        raise WireError("a trajectory has at least one frame, got none")
    header = _trajectory_header(frames[0])
    each = FRAMES_OF_A_ROW if header.kept else _PLAIN
    if len(frames) != 1 + each * len(header.lengths):
        raise WireError(f"{len(header.lengths)} rows need {1 + each * len(header.lengths)} frames, got {len(frames)}")
    starts = range(1, len(frames), each)
    rows = tuple(
        [_row(n, frames[at : at + each], f"rows[{at // each}]") for at, n in zip(starts, header.lengths, strict=True)]
    )
    if not any([np.count_nonzero(row.mask) for row in rows]):
        raise WireError("no token of the trajectory was sampled by the policy")
    if header.turn_rewards:
        _check_turn_rewards(header, rows)
    return Trajectory(
        TicketId(*header.id),
        header.attempt,
        header.kind,
        header.actor,
        header.task_id,
        header.env,
        rows,
        header.reward,
        header.rewards,
        header.turns,
        header.stop_reason,
        header.timings,
        header.metrics,
        header.turn_records,
        header.logged,
        header.turn_rewards,
        header.hint,
    )


def _trajectory_header(frame: Frame) -> _Header:
    _check_size(frame, MAX_TRAJECTORY_HEADER_BYTES)
    try:
        header = _HEADERS.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"header is not that of a trajectory: {error}") from error
    if header.turn_records and len(header.turn_records) != header.turns:
        raise WireError(f"turn_records has {len(header.turn_records)} entries, expected one per turn: {header.turns}")
    named = {"rewards": header.rewards, "timings": header.timings, "metrics": header.metrics}
    if not math.isfinite(header.reward + sum(sum(numbers.values()) for numbers in named.values())):
        # One of them is not finite, or their sum overflows.
        _number(header.reward, "reward")
        for name, numbers in named.items():
            for key, number in numbers.items():
                _number(number, f"{name}.{key}")
    return header


def _check_turn_rewards(header: _Header, rows: Sequence[Row]) -> None:
    """Raises WireError unless the spans hold each policy token once, in every row in the order of the turns, and the
    turns' rewards sum to the reward up to rounding."""
    turns = header.turn_rewards
    if len(turns) != header.turns:
        raise WireError(f"turn_rewards has {len(turns)} entries, expected one per turn: {header.turns}")
    _check_spans(turns, rows)
    total, size = sum([turn.reward for turn in turns]), 1.0 + sum([abs(turn.reward) for turn in turns])
    if not (math.isfinite(size) and abs(total - header.reward) <= 1e-9 * size):
        raise WireError(f"turn_rewards sum to {total!r}, and reward is {header.reward!r}")


def _check_spans(turns: Sequence[TurnReward], rows: Sequence[Row]) -> None:
    """Raises WireError unless the spans hold each policy token once, in every row in the order of the turns."""
    held, ends = [np.zeros(len(row), np.bool_) for row in rows], [0] * len(rows)
    for number, turn in enumerate(turns):
        for span in turn.spans:
            row, start, end = span.row, span.start, span.start + span.tokens
            if row >= len(rows) or start < ends[row] or end > len(held[row]):
                raise WireError(f"turn_rewards[{number}]: {span} is outside of its row, or not behind the span before")
            held[row][start:end] = True
            ends[row] = end
    for place, row_held in enumerate(held):
        if row_held.tobytes() != rows[place].mask.tobytes():
            raise WireError(f"turn_rewards: the turns' tokens are not those of rows[{place}] that the policy sampled")


def _row(length: int, frames: Sequence[Frame], where: str) -> Row:
    for (name, _), size, frame in zip(_ARRAYS, _SIZES, frames, strict=False):
        if len(frame) != length * size:
            raise WireError(f"{where}.{name} has {len(frame)} bytes, expected {length * size} for {length} tokens")
    token_ids, mask, logprobs, versions = [
        np.frombuffer(memoryview(frame).toreadonly(), dtype) for frame, dtype in zip(frames, _DTYPES, strict=False)
    ]
    # Few passes over the arrays, since the buffer does this for every token of a run. NaN makes the comparison false.
    if np.minimum.reduce(token_ids) < 0:
        raise WireError(f"{where}.token_ids holds a negative id")
    if not (np.maximum.reduce(logprobs) <= 1e-3 and np.minimum.reduce(logprobs) >= _LEAST):
        raise WireError(f"{where}.logprobs holds a value that is not a log-probability")
    if np.minimum.reduce(versions) < CONTEXT or (versions >= 0).tobytes() != bytes(frames[1]):
        # numpy would accept a byte other than 0 or 1 as a bool.
        if np.maximum.reduce(mask.view(np.uint8)) > 1:
            raise WireError(f"{where}.mask holds bytes other than 0 and 1")
        raise WireError(f"{where}.versions must be >= 0 on sampled tokens and {CONTEXT} elsewhere")
    kept = None if len(frames) == _PLAIN else _kept(frames[_PLAIN:], token_ids[mask], where)
    return Row(token_ids, mask, logprobs, versions, kept)


def _kept(frames: Sequence[Frame], sampled: Int32, where: str) -> KeptIds:
    """`sampled`: the sampled tokens of the row. Raises WireError."""
    if any(len(frame) % dtype.itemsize for frame, dtype in zip(frames, _OF_KEPT, strict=True)):
        raise WireError(f"{where}.kept has {[*map(len, frames)]} bytes, expected counts of 2 and ids of 4")
    counts, ids = (
        np.frombuffer(memoryview(frame).toreadonly(), dtype) for frame, dtype in zip(frames, _OF_KEPT, strict=True)
    )
    kept = KeptIds(counts, ids)
    if problem := kept.problem(sampled):
        raise WireError(f"{where}.kept {problem}")
    return kept


def _bytes(array: Any, dtype: np.dtype[Any]) -> Frame:
    return np.ascontiguousarray(array, dtype=dtype).data.cast("B")


def _check_size(header: Frame, most: int) -> None:
    if len(header) > most:
        raise WireError(f"header has {len(header)} bytes, at most {most} are read")


def _number(value: Any, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise WireError(f"{name} is {value!r}, expected a finite number")
    return float(value)
