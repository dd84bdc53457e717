"""Recorded turns as bytes: one msgpack body per record, and beside it the snapshot, which is stored apart.

    frame of a request    [ticket, attempt, body, snapshot]
    frame of a ticket     [body, snapshot]

Nothing is unpickled, and every record is checked completely before it is stored, since one that could not be read would
stop its ticket on every actor. Decoding raises `WireError` naming the field.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from asyncrl.trajectory import (
    MAX_PARTS,
    MAX_STATE_BYTES,
    Attempt,
    Branch,
    Finite,
    GroupIndex,
    GroupNumber,
    Seconds,
    TicketId,
)
from asyncrl.trajectory.kept_ids import KeptIds
from asyncrl.trajectory.turns import MAX_RECORDS, Recorded, RecordedAnswer, RecordedReset, RecordedSample, Snapshot
from asyncrl.wire import Frame, WireError

T = TypeVar("T")

MAX_TURN_BYTES = 64 << 20
"""Most bytes of any record, its snapshot included; a run's own bound is `buffer.turn_max_kb`."""
MAX_MESSAGES = 4096
"""Most messages in one record."""
_LEAST = float(np.finfo(np.float32).min)

_Digest = Annotated[str, msgspec.Meta(min_length=32, max_length=32)]
_Number = Annotated[int, msgspec.Meta(ge=0, lt=MAX_RECORDS)]
_Numbers = Annotated[dict[str, Finite], msgspec.Meta(max_length=MAX_PARTS)]
_Messages = Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_MESSAGES)]
_State = Any
"""str, bytes or None: msgspec decodes no union of the first two, so `_decoded` checks it."""
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class Unrecordable(ValueError):
    """A turn that no message can carry: too large, or with a value that msgpack has no form for."""


class _Reset(msgspec.Struct, frozen=True, array_like=True, tag="reset"):
    messages: _Messages
    tools: _Digest
    state: _State


class _Sample(msgspec.Struct, frozen=True, array_like=True, tag="sample"):
    number: _Number
    token_ids: bytes
    logprobs: bytes
    versions: bytes
    counts: bytes | None
    ids: bytes
    stop_reason: Literal["stop", "length", "abort"]
    prompt: _Digest
    queue_s: Seconds | None
    generate_s: Seconds
    prefilled: _Tokens | None
    summary: bool
    beside: _Number = 0
    """Not in records of an earlier state of the code."""


class _Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    number: _Number
    messages: _Messages
    reward: Finite
    done: bool
    rewards: _Numbers
    metrics: _Numbers
    state: _State
    calls: Annotated[list[tuple[str, Finite]], msgspec.Meta(max_length=MAX_MESSAGES)]
    environment_s: Seconds


class _Sent(msgspec.Struct, frozen=True, array_like=True):
    id: tuple[Branch, GroupNumber, GroupIndex]
    attempt: Attempt
    body: bytes
    snapshot: _State


class _Carried(msgspec.Struct, frozen=True, array_like=True):
    body: bytes
    snapshot: _State


_BODIES = msgspec.msgpack.Decoder(_Reset | _Sample | _Answer)
_SENT = msgspec.msgpack.Decoder(_Sent)
_CARRIED = msgspec.msgpack.Decoder(_Carried)
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """A record as its sender wrote it."""

    record: Recorded
    body: bytes
    snapshot: Snapshot | None

    @property
    def size(self) -> int:
        return len(self.body) + snapshot_bytes(self.snapshot)


def snapshot_bytes(snapshot: Snapshot | None) -> int:
    return len(snapshot.encode() if isinstance(snapshot, str) else snapshot or b"")


def encode_turn(id: TicketId, attempt: int, record: Recorded, most: int = MAX_TURN_BYTES) -> bytes:
    """The frame of a record in a request. Raises Unrecordable: it is larger than `most` bytes, or not encodable."""
    body = encode_body(record)
    frame = _encoded(_Sent((id.branch, id.group, id.index), attempt, body, _snapshot_of(record)), record)
    if len(frame) > most:
        raise Unrecordable(
            f"{record.named} of ticket {id} has {len(frame)} bytes with its snapshot, expected at most "
            f"{most} (buffer.turn_max_kb)"
        )
    return frame


def decode_turn(frame: Frame, most: int = MAX_TURN_BYTES) -> tuple[TicketId, int, StoredTurn]:
    """Ticket, attempt and record of a frame in a request. Raises WireError."""
    sent = _decoded(_SENT, frame, most)
    return TicketId(*sent.id), sent.attempt, stored_turn(sent.body, sent.snapshot)


def stored_turn(body: bytes, snapshot: Snapshot | None) -> StoredTurn:
    """Raises WireError."""
    return StoredTurn(decode_body(body, snapshot), body, snapshot)


def encode_carried(record: Recorded) -> bytes:
    """The frame of a record that travels with its ticket, as it is stored. Raises Unrecordable."""
    return _encoded(_Carried(encode_body(record), _snapshot_of(record)), record)


def kept_bytes(turn: StoredTurn) -> bytes:
    """`encode_carried` of a record as it came."""
    return _encode(_Carried(turn.body, turn.snapshot))


def decode_carried(frame: Frame) -> Recorded:
    """Raises WireError."""
    carried = _decoded(_CARRIED, frame, 2 * MAX_TURN_BYTES)
    return decode_body(carried.body, carried.snapshot)


def encode_body(record: Recorded) -> bytes:
    """A record without its snapshot. Raises Unrecordable."""
    try:
        body = _body(record)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Unrecordable(f"{record.named} cannot be a message: {error}") from error
    return _encoded(body, record)


def _encoded(content: msgspec.Struct, record: Recorded) -> bytes:
    try:
        return _encode(content)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Unrecordable(f"{record.named} cannot be a message: {error}") from error


def decode_body(body: Frame, snapshot: Snapshot | None = None) -> Recorded:
    """Raises WireError."""
    read = _decoded(_BODIES, body, MAX_TURN_BYTES)
    if isinstance(read, _Sample):
        if snapshot is not None:
            raise WireError(f"intent {read.number} came with a snapshot: only answers have one")
        return _sample(read)
    if read.state is not None and len(_key(read.state)) > MAX_STATE_BYTES:
        raise WireError(f"state has {len(_key(read.state))} bytes, expected at most {MAX_STATE_BYTES}")
    if isinstance(read, _Reset):
        return RecordedReset(read.messages, read.tools, read.state, snapshot)
    if any(not seconds >= 0 for _, seconds in read.calls):
        raise WireError("calls holds a tool with negative seconds")
    calls = tuple(read.calls)
    about = (read.rewards, read.metrics, read.state, calls, read.environment_s, snapshot)
    return RecordedAnswer(read.number, read.messages, read.reward, read.done, *about)


def tools_digest(tools: Sequence[Any]) -> str:
    """32 hex digits over the tools in OpenAI form. Raises Unrecordable."""
    try:
        return xxhash.xxh3_128(msgspec.json.encode(list(tools), order="deterministic")).hexdigest()
    except (TypeError, ValueError, RecursionError) as error:
        raise Unrecordable(f"the tools cannot be a message: {error}") from error


def _body(record: Recorded) -> _Reset | _Sample | _Answer:
    if isinstance(record, RecordedReset):
        return _Reset([dict(m) for m in record.messages], record.tools, record.state)
    if isinstance(record, RecordedSample):
        kept = record.kept
        return _Sample(
            record.number,
            _bytes(record.token_ids, np.int32),
            _bytes(record.logprobs, np.float32),
            _bytes(record.versions, np.int32),
            None if kept is None else _bytes(kept.counts, np.uint16),
            b"" if kept is None else _bytes(kept.ids, np.int32),
            record.stop_reason,
            record.prompt,
            None if record.queue_s is None else _finite(record.queue_s, "queue_s"),
            _finite(record.generate_s, "generate_s"),
            record.prefilled,
            record.summary,
            record.beside,
        )
    if not isinstance(record, RecordedAnswer):
        raise TypeError(f"{type(record).__name__} is no recorded turn")
    calls = [(name, _finite(seconds, "calls")) for name, seconds in record.calls]
    return _Answer(
        record.number,
        [dict(m) for m in record.messages],
        _finite(record.reward, "reward"),
        bool(record.done),
        _numbers(record.rewards.items(), "rewards"),
        _numbers(record.metrics.items(), "metrics"),
        record.state,
        calls,
        _finite(record.environment_s, "environment_s"),
    )


def _sample(read: _Sample) -> RecordedSample:
    where = f"intent {read.number}"
    token_ids = _array(read.token_ids, np.int32, f"{where}: token_ids")
    logprobs = _array(read.logprobs, np.float32, f"{where}: logprobs")
    versions = _array(read.versions, np.int32, f"{where}: versions")
    if not len(token_ids) == len(logprobs) == len(versions):
        raise WireError(
            f"{where} has {len(token_ids)} token_ids, {len(logprobs)} logprobs and {len(versions)} versions"
        )
    if read.stop_reason == "abort" and not len(token_ids):
        raise WireError(f"{where} was interrupted before its first token: there is nothing to record")
    if len(token_ids) and int(token_ids.min()) < 0:
        raise WireError(f"{where}: token_ids holds a negative id")
    if len(versions) and int(versions.min()) < 0:
        raise WireError(f"{where}: versions holds a negative one")
    # NaN makes the comparison false.
    if len(logprobs) and not (logprobs.max() <= 1e-3 and logprobs.min() >= _LEAST):
        raise WireError(f"{where}: logprobs holds a value that is not a log-probability")
    about = (_kept(read, token_ids, where), read.queue_s, read.generate_s, read.prefilled, read.summary, read.beside)
    return RecordedSample(read.number, token_ids, logprobs, versions, read.stop_reason, read.prompt, *about)


def _kept(read: _Sample, token_ids: npt.NDArray[np.int32], where: str) -> KeptIds | None:
    if read.counts is None:
        if read.ids:
            raise WireError(f"{where} has kept ids without their counts")
        return None
    counts, ids = _array(read.counts, np.uint16, f"{where}: counts"), _array(read.ids, np.int32, f"{where}: ids")
    kept = KeptIds(counts, ids)
    if problem := kept.problem(token_ids):
        raise WireError(f"{where}: kept {problem}")
    return kept


def _array(data: bytes, dtype: type[Any], name: str) -> npt.NDArray[Any]:
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise WireError(f"{name} has {len(data)} bytes, expected a multiple of {size}")
    return np.frombuffer(data, dtype)


def _bytes(array: npt.NDArray[Any], dtype: type[Any]) -> bytes:
    return np.ascontiguousarray(array, dtype).tobytes()


def _snapshot_of(record: Recorded) -> Snapshot | None:
    return record.snapshot if isinstance(record, RecordedReset | RecordedAnswer) else None


def _key(state: str | bytes) -> bytes:
    return state.encode("utf-8", "surrogatepass") if isinstance(state, str) else state


def _finite(value: float, name: str) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}, expected a finite number")
    return float(value)


def _numbers(pairs: Iterable[tuple[str, float]], name: str) -> dict[str, float]:
    return {key: _finite(value, f"{name}.{key}") for key, value in pairs}


def _decoded(decoder: msgspec.msgpack.Decoder[T], frame: Frame, most: int) -> T:
    size = len(memoryview(frame))
    if size > most:
        raise WireError(f"a recorded turn has {size} bytes, at most {most} are read")
    try:
        read = decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"a recorded turn cannot be read: {error}") from error
    for name in ("state", "snapshot"):
        value = getattr(read, name, None)
        if not isinstance(value, str | bytes | None):
            raise WireError(f"{name} is a {type(value).__name__}, expected text, bytes or nothing")
    return read
