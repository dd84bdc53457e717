"""Recorded turns: what came into an episode from outside, so that the episode can be played again up to there.

    reset ──> answer -1                        RecordedReset
    sample ──> intent k    before the step     RecordedSample
    step   ──> answer k    behind it           RecordedAnswer

An episode is resumed by playing its recording through the ordinary loop: rendering is deterministic, so rows, masks,
spans and rewards are made again by the same code. The digest of the prompt in front of each sample proves that they
are the same. `asyncrl/wire/turns.py` makes messages of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from asyncrl.trajectory.kept_ids import KeptIds

DIVERGED = "env_diverged"
"""Reason of the failure of an episode whose environment, played again, answers otherwise than was recorded."""
NOT_SCORED = "group_score"
"""Reason of the failure of an episode whose `env.group_score` failed, or had not all of its group in time."""
Snapshot = bytes | str
"""The state of an environment, or a reference to it; immutable."""
RecordKind = Literal["intent", "answer"]
Place = tuple[int, bool]
Form = Literal["reset", "partial", "sample", "summary", "answer"]
"""What decides which record can come next."""
RESET = -1
"""Number of the record of a reset."""
MAX_RECORDS = 1 << 17
"""Records of one ticket."""


class Recorded(ABC):
    """A RecordedReset, RecordedSample or RecordedAnswer."""

    __slots__ = ()

    @property
    @abstractmethod
    def place(self) -> Place:
        """Its order among the records of a ticket: number of the turn, whether it is an answer."""

    @property
    @abstractmethod
    def form(self) -> Form: ...

    @property
    def kind(self) -> RecordKind:
        return "answer" if self.place[1] else "intent"

    @property
    def named(self) -> str:
        """For messages."""
        return f"{self.kind} {self.place[0]}"


@dataclass(frozen=True, slots=True)
class RecordedReset(Recorded):
    """What `environment.reset` has returned."""

    messages: Sequence[Mapping[str, Any]]
    tools: str
    """`tools_digest` of the policy's tools."""
    state: str | bytes | None = None
    """`reset_state`."""
    snapshot: Snapshot | None = None

    @property
    def place(self) -> Place:
        return RESET, True

    @property
    def form(self) -> Form:
        return "reset"


@dataclass(frozen=True, slots=True, eq=False)
class RecordedSample(Recorded):
    """One output of the policy: the intent of a step."""

    number: int
    """Number of the turn: 0, 1, 2 ..."""
    token_ids: npt.NDArray[np.int32]
    """[N], N >= 1 under `abort`, N >= 0 otherwise"""
    logprobs: npt.NDArray[np.float32]
    """[N] behaviour logprob, as in a Generation."""
    versions: npt.NDArray[np.int32]
    """[N]"""
    stop_reason: Literal["stop", "length", "abort"]
    """abort: the first tokens of an output that its actor could not finish; the next attempt samples the rest, and
    records the whole under the same number."""
    prompt: str
    """`ids_digest` of the row's ids in front of the sample."""
    kept: KeptIds | None = None
    queue_s: float | None = None
    generate_s: float = 0.0
    prefilled: int | None = None
    summary: bool = False
    """The environment gives no answer to it, so another sample follows: a summary of the conversation
    (`env.compact`), or a reply to an agent behind the endpoint."""
    beside: int = 0
    """Requests of the same agent that ran when this one was answered."""

    @property
    def place(self) -> Place:
        return self.number, False

    @property
    def form(self) -> Form:
        if self.partial:
            return "partial"
        return "summary" if self.summary else "sample"

    @property
    def partial(self) -> bool:
        return self.stop_reason == "abort"

    @property
    def span(self) -> tuple[int | None, int | None]:
        """Oldest and newest version of its tokens; None without any."""
        return (int(self.versions.min()), int(self.versions.max())) if len(self.versions) else (None, None)

    def digest(self) -> str:
        """Digest of the sampled tokens."""
        return tokens_digest([(self.token_ids, self.logprobs, self.versions, self.kept)])


@dataclass(frozen=True, slots=True)
class RecordedAnswer(Recorded):
    """What `environment.step` has returned, as in a Turn."""

    number: int
    """Number of the turn that it answers."""
    messages: Sequence[Mapping[str, Any]]
    reward: float
    done: bool
    rewards: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    state: str | bytes | None = None
    calls: Sequence[tuple[str, float]] = ()
    environment_s: float = 0.0
    """Seconds that the step took."""
    snapshot: Snapshot | None = None
    """The environment after the step."""

    @property
    def place(self) -> Place:
        return self.number, True

    @property
    def form(self) -> Form:
        return "answer"


def successors(last: tuple[int, Form] | None) -> set[Place]:
    """Places of the records that can come behind one of this number and form; None: behind nothing.

    An interrupted sample is followed by the whole one, under the same number.
    """
    if last is None:
        return {(RESET, True), (0, False)}
    number, form = last
    if form in ("partial", "sample"):
        return {(number, form == "sample")}
    return {(number + 1, False)}


Tokens = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int32], KeptIds | None]
"""token_ids, logprobs, versions, kept ids of sampled tokens."""


def tokens_digest(parts: Iterable[Tokens]) -> str:
    """32 hex digits over sampled tokens, one part behind the other; how they are parted makes no difference."""
    arrays: list[list[npt.NDArray[Any]]] = [[], [], [], [], []]
    for ids, logprobs, versions, kept in parts:
        of_kept = () if kept is None else (kept.counts, kept.ids)
        for into, array in zip(arrays, (ids, logprobs, versions, *of_kept), strict=False):
            into.append(array)
    h = xxhash.xxh3_128()
    for each in arrays:
        h.update(sum(len(array) for array in each).to_bytes(8, "little"))
        for array in each:
            h.update(np.ascontiguousarray(array).data)
    return h.hexdigest()


def ids_digest(ids: Sequence[int] | npt.NDArray[np.int32]) -> str:
    """32 hex digits over token ids [T]."""
    return xxhash.xxh3_128(np.ascontiguousarray(ids, np.int32).data).hexdigest()
