"""What a teacher on a server says of the tokens that the policy sampled in one group (`learner.teacher.scored_by`).

A record is one block of bytes, which a scorer puts, the disk stores and a batch brings: the length of a msgpack header
as a little-endian uint64, the header, and the arrays of each trajectory in order: ids, logprobs, sampled.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
import numpy as np
import xxhash

from asyncrl.trajectory import Attempt, Branch, Float32, GroupNumber, Int32, LogHead
from asyncrl.wire import Frame, WireError

MAX_K = 1024
"""Most words of one token."""
MAX_TOKENS = 1 << 28
"""Most sampled tokens of one trajectory, beyond anything that a record can hold."""
SLACK = 1e-3
"""By how much a logprob may be above 0, and probabilities above 1: what rounding in bfloat16 gives."""
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class TrajectoryScores:
    """A teacher's scores of the n tokens that the policy sampled in one trajectory, row by row; arrays are
    read-only."""

    ids: Int32
    """[n, k] the teacher's most likely words, the most likely one first"""
    logprobs: Float32
    """[n, k] natural logarithms of their probabilities, over the whole vocabulary, at temperature 1"""
    sampled: Float32
    """[n] the same of the word that the policy sampled"""

    def __len__(self) -> int:
        return len(self.sampled)


@dataclass(frozen=True, slots=True, eq=False)
class GroupScores:
    """The scores of all trajectories of one group, which a scorer puts together."""

    branch: int
    group: int
    attempt: int
    """Which lease of the group brought them."""
    scorer: str
    teacher: str
    """Digest of the teacher."""
    trajectories: tuple[str, ...]
    """Digest of each trajectory that was scored, by index."""
    scores: tuple[TrajectoryScores, ...]
    """By index."""
    logged: LogHead | None = None
    """Their line in the scorer's log."""

    @property
    def k(self) -> int:
        """Words of each token; 0: the sampled one alone."""
        return int(self.scores[0].ids.shape[1])

    def digest(self) -> str:
        """32 hex digits over what is trained on, and over what was scored by whom; not the attempt, scorer and log."""
        h = xxhash.xxh3_128(f"{self.branch}.{self.group} {self.teacher} {' '.join(self.trajectories)}".encode())
        for each in self.scores:
            for array in (each.ids, each.logprobs, each.sampled):
                h.update(repr(array.shape).encode())
                h.update(np.ascontiguousarray(array).data)
        return h.hexdigest()

    def with_line(self, head: LogHead | None) -> GroupScores:
        return replace(self, logged=head)


_Digest = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]


class _Header(msgspec.Struct, frozen=True):
    branch: Branch
    group: GroupNumber
    attempt: Attempt
    scorer: Annotated[str, msgspec.Meta(max_length=256)]
    teacher: _Digest
    trajectories: Annotated[tuple[_Digest, ...], msgspec.Meta(min_length=1, max_length=1 << 14)]
    k: Annotated[int, msgspec.Meta(ge=0, le=MAX_K)]
    tokens: tuple[_Tokens, ...]
    """Sampled tokens of each trajectory."""
    logged: LogHead | None = None


_encode = msgspec.msgpack.Encoder().encode
_HEADERS = msgspec.msgpack.Decoder(_Header)


def to_record(scores: GroupScores) -> bytes:
    header = _encode(
        _Header(
            scores.branch,
            scores.group,
            scores.attempt,
            scores.scorer,
            scores.teacher,
            scores.trajectories,
            scores.k,
            tuple(len(each) for each in scores.scores),
            scores.logged,
        )
    )
    arrays = (a for each in scores.scores for a in (each.ids, each.logprobs, each.sampled))
    padding = bytes(-len(header) % 4)
    return b"".join([_LENGTH.pack(len(header)), header, padding, *(np.ascontiguousarray(a).tobytes() for a in arrays)])


def bytes_at_most(scores: GroupScores) -> int:
    """Most bytes of the record, with a header as long as one may be."""
    return _LENGTH.size + _MAX_HEADER_BYTES + 4 * sum(len(each) * (2 * scores.k + 1) for each in scores.scores)


def from_record(record: Frame) -> GroupScores:
    """The inverse of `to_record`; arrays are read-only views on `record`. Raises WireError for a record that is
    malformed, and for numbers that no distribution has."""
    view = memoryview(record)
    if len(view) < _LENGTH.size:
        raise WireError(f"a record of scores has {len(view)} bytes, expected at least {_LENGTH.size}")
    (length,) = _LENGTH.unpack_from(view)
    if length > min(_MAX_HEADER_BYTES, len(view) - _LENGTH.size):
        raise WireError(f"a record of scores of {len(view)} bytes claims a header of {length}")
    try:
        header = _HEADERS.decode(view[_LENGTH.size : _LENGTH.size + length])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"the header of a record of scores cannot be read: {error}") from error
    if len(header.tokens) != len(header.trajectories):
        raise WireError(f"scores of {len(header.tokens)} trajectories name {len(header.trajectories)}")
    start = _LENGTH.size + length + -length % 4
    if len(view) - start != 4 * sum(n * (2 * header.k + 1) for n in header.tokens):
        raise WireError(f"a record of scores has {len(view)} bytes, which is not what its lengths add up to")
    scores = []
    for n in header.tokens:
        one, start = _arrays(view, start, n, header.k)
        scores.append(one)
    name = f"the scores of group {header.branch}.{header.group}"
    if why := unlikely(scores):
        raise WireError(f"{name}: {why}")
    return GroupScores(
        header.branch,
        header.group,
        header.attempt,
        header.scorer,
        header.teacher,
        header.trajectories,
        tuple(scores),
        header.logged,
    )


def _arrays(view: memoryview, start: int, n: int, k: int) -> tuple[TrajectoryScores, int]:
    ids = np.frombuffer(view, np.int32, n * k, start).reshape(n, k)
    logprobs = np.frombuffer(view, np.float32, n * k, start + 4 * n * k).reshape(n, k)
    sampled = np.frombuffer(view, np.float32, n, start + 8 * n * k)
    return TrajectoryScores(ids, logprobs, sampled), start + 4 * n * (2 * k + 1)


def unlikely(scores: Sequence[TrajectoryScores]) -> str:
    """Why these are not the probabilities of words; empty: they may be."""
    for place, each in enumerate(scores):
        if why := _unlikely_logprobs(each) or _unlikely_words(each):
            return f"trajectory {place}: {why}"
    return ""


def _unlikely_logprobs(scores: TrajectoryScores) -> str:
    for name, numbers in (("logprobs", scores.logprobs), ("sampled", scores.sampled)):
        if not np.isfinite(numbers).all():
            return f"{name} are not finite, expected natural logarithms of probabilities"
        if numbers.size and float(numbers.max()) > SLACK:
            return f"{name} reach {float(numbers.max()):.4g}, expected at most 0"
    return ""


def _unlikely_words(scores: TrajectoryScores) -> str:
    if not scores.ids.size:
        return ""
    if int(scores.ids.min()) < 0:
        return f"ids hold {int(scores.ids.min())}, expected words from 0 on"
    if (np.diff(np.sort(scores.ids, 1), axis=1) == 0).any():
        return "ids name a word twice for one token"
    most = float(np.exp(scores.logprobs.astype(np.float64)).sum(1).max())
    return f"the probabilities of a token add up to {most:.4g}, expected at most 1" if most > 1 + SLACK else ""
