"""The record that everything passes on: what one episode produced, token by token.

There is no prompt/response split: with tools and several turns it does not exist. A row is one token sequence; an
episode has several when the conversation's prefix changed under it (a template that rewrites history, a branch).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from asyncrl.trajectory.kept_ids import KeptIds
from asyncrl.trajectory.turns import Recorded

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Finite = Annotated[float, msgspec.Meta(ge=float(np.finfo(np.float64).min), le=float(np.finfo(np.float64).max))]
"""Bounds that a number must keep when it is decoded from a message."""

Branch = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
GroupNumber = Annotated[int, msgspec.Meta(ge=0, le=2**41 - 1)]
"""Evaluation tickets have the upper half (buffer/evaluations/places.py)."""
GroupIndex = Annotated[int, msgspec.Meta(ge=0, le=2**20 - 1)]
Attempt = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""The numbers of a ticket are only compared: a ledger that was lost may have issued any of them."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=float(np.finfo(np.float64).max))]

Kind = Literal["train", "eval"]
StopReason = Literal["done", "max_turns", "max_tokens", "length", "aborted"]
"""done: the environment ended it. length: a turn ran into `actors.max_new_tokens` and the environment took that as the
end. max_turns, max_tokens: the episode's own limits. aborted: ended from outside; never trained."""

CONTEXT = -1
"""Version of a token that the policy did not sample."""


@dataclass(frozen=True, slots=True)
class TicketId:
    """Names one trajectory: the branch of history on which its attempt was lent, its group, its place in the group. A
    group that goes on when a branch begins has tickets of both."""

    branch: Branch
    group: GroupNumber
    index: GroupIndex

    def __str__(self) -> str:
        return f"{self.branch}.{self.group}.{self.index}"


Lease = tuple[TicketId, Attempt]
"""A ticket and its attempt: what an actor holds until it puts a trajectory, fails or gives the ticket back."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Permission to produce one trajectory, issued to one actor. Each time it is issued is a new attempt."""

    id: TicketId
    attempt: Attempt
    kind: Kind
    task: Mapping[str, Any]
    min_version: tuple[Count, Count]
    """(branch, version) that the actor must hold at least; an eval ticket is pinned to exactly this."""
    group_size: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    temperature: Finite
    """0 is greedy: for evaluation, and for the first of a group under `learner.greedy_baseline`."""
    seed: Count
    """Seed of this attempt's sampling and environment; differs between the attempts of one ticket."""
    lease_s: Finite
    eval_set: str = ""
    """Name of the held-out set of an eval ticket."""
    durable: bool = False
    """Its turns are recorded in the buffer as they are played (`buffer.turns`); fixed when its group is issued."""
    turns: tuple[Recorded, ...] = ()
    """What its attempts so far have recorded, in order: the episode goes on behind it. The last may be an interrupted
    sample, or one whose answer was not recorded."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One token sequence. The first four arrays have the same length T >= 1 and are read-only."""

    token_ids: Int32
    """[T]"""
    mask: Bool
    """[T] true where the policy sampled the token."""
    logprobs: Float32
    """[T] behaviour logprob (natural log, at the sampling temperature); 0 where `mask` is false."""
    versions: Int32
    """[T] policy version that sampled the token; CONTEXT where `mask` is false."""
    kept: KeptIds | None = None
    """The ids that each sampled token was drawn from, under truncated sampling, over which `logprobs` is
    taken. None: the whole vocabulary."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def digest(self) -> str:
        """32 hex digits over the arrays; see Trajectory.digest."""
        h = xxhash.xxh3_128()
        self.hash_into(h)
        return h.hexdigest()

    def hash_into(self, h: xxhash.xxh3_128) -> None:
        h.update(len(self).to_bytes(8, "little"))
        for array in self._arrays:
            h.update(np.ascontiguousarray(array).data)

    @property
    def _arrays(self) -> tuple[npt.NDArray[Any], ...]:
        kept = () if self.kept is None else (self.kept.counts, self.kept.ids)
        return self.token_ids, self.mask, self.logprobs, self.versions, *kept


def succeeded(reward: float, rewards: Mapping[str, float], name: str) -> bool:
    """Whether an episode that earned `reward`, with those parts, succeeds: the part of the name, or the whole where it
    has none of the name, is 1 or more."""
    return rewards.get(name, reward) >= 1


class TurnRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one assistant turn cost, as its actor measured it. Metadata: outside the digest, and it decides nothing.

    A message carries it as an array in this order. A later field (the actor that played the turn) is appended with a
    default: whoever reads an older record gets the default, whoever does not know the field ignores it, and the buffer
    stores the bytes as they came. So neither `Trajectory` nor stored payloads change with it.
    """

    queue: Seconds | None
    """Seconds from the request to its first token, by the engine; None: it does not tell, or there was no token."""
    generate: Seconds
    """Seconds from the request to the end of its output, `queue` included."""
    environment: Seconds | None
    """Seconds that the environment took for the message (its `step`; `reset` is in no turn). For an agent, from the end
    of the output until its next request or its own end; None where another of its requests ran then."""
    prefilled: Count
    """Tokens that the engine computed before it sampled, recomputation under new weights included, where it counts them
    per request (hf, vllm); otherwise the tokens of the prompt that the row did not hold yet."""
    sampled: Count
    """Tokens that the engine sampled, with what was cut off behind an agent's stop string. Where turns are recorded
    (`buffer.turns`), those of the whole turn, in whichever attempt, as are the seconds."""


MAX_STATE_BYTES = 64
MAX_PARTS = 1024
"""Named parts of a reward."""

StateKey = Annotated[bytes, msgspec.Meta(max_length=MAX_STATE_BYTES)]
"""Name of a state of the environment; two that are equal, within one group, are the same state."""


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens that the policy sampled in one piece."""

    row: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    """Its place among the trajectory's rows."""
    start: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    """The place of the first token in the row."""
    tokens: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]


class TurnReward(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one assistant turn earned, and which tokens earned it: what estimators by turn train on, so it is part of
    the digest (the parts of the reward, which are for the record, are not).

    A message carries it as an array in this order; as in a TurnRecord, a later field is appended with a default.
    """

    reward: Finite
    """That the environment gave for the turn. Those of all turns sum to the trajectory's reward."""
    spans: Annotated[tuple[Span, ...], msgspec.Meta(max_length=2**16)]
    """The turn's sampled tokens: one span, several for an agent that asked for several choices, none for a turn without
    a token. The spans of all turns hold each policy token once, in every row in the order of the turns."""
    state: StateKey | None = None
    """Key of the environment's state when the turn was sampled, if the environment names it. None at the first turn:
    its prompt names it."""
    rewards: Annotated[dict[str, Finite], msgspec.Meta(max_length=MAX_PARTS)] = {}
    """The parts of the turn's reward by name, for the record; they need not sum to it."""


_packed = msgspec.msgpack.Encoder().encode
MAX_HINT = 1 << 18
"""Characters of a hint."""
MAX_TURNS_RECORDED = 1 << 16
"""Turns of an episode with more have neither times nor rewards in the record: the episode is kept all the same."""


class LogHead(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How far the log of an actor was: the number of a line, and a digest of everything up to it."""

    line: Annotated[int, msgspec.Meta(ge=0, le=2**48 - 1)]
    digest: Annotated[str, msgspec.Meta(max_length=64)]


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One finished episode."""

    id: TicketId
    attempt: int
    kind: Kind
    actor: str
    task_id: str
    env: str
    rows: tuple[Row, ...]
    reward: float
    """What is trained on: the sum of the rewards that the environment gave at each turn."""
    rewards: Mapping[str, float]
    """Its parts by name, for the record; they need not sum to it."""
    turns: int
    """Assistant turns."""
    stop_reason: StopReason
    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds: `generate`, `environment`, `total`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the environment counted."""
    turn_records: tuple[TurnRecord, ...] = ()
    """One per turn, or none where nobody measured."""
    logged: LogHead | None = None
    """Its line in its actor's log, which was written before it is put; None: its actor keeps no log."""
    turn_rewards: tuple[TurnReward, ...] = ()
    """One per turn; none in a record of an asyncrl that did not keep them."""
    hint: str = ""
    """What a teacher that is the policy itself is shown beside the prompt (`learner.teacher.shown`)."""

    @property
    def num_tokens(self) -> int:
        return sum(len(row) for row in self.rows)

    @property
    def num_policy_tokens(self) -> int:
        return sum(int(np.count_nonzero(row.mask)) for row in self.rows)

    @property
    def oldest_version(self) -> int:
        """The oldest version of a token that carries loss: the trajectory's staleness at learner version v is v minus
        this."""
        return min(int(row.versions[row.mask].min()) for row in self.rows if row.mask.any())

    @property
    def newest_version(self) -> int:
        return max(int(row.versions[row.mask].max()) for row in self.rows if row.mask.any())

    def digest(self) -> str:
        """32 hex digits over what is trained on, and what decides how: identity, environment, arrays, reward and its
        named parts, the turns' rewards where they are kept, the hint, number of turns, stop reason; not timings, turn
        records, metrics, the log or the attempt.

        XXH3, 128 bits: witnesses of one run compare it, so it must tell apart what differs by accident (among four
        billion trajectories: one chance in 2**64), not what somebody forged. A cryptographic one takes 50 to 100 times
        as long.
        """
        h = xxhash.xxh3_128(f"{self.id} {self.kind} {self.task_id} {float(self.reward).hex()}".encode())
        parts = sorted((name, float(value)) for name, value in self.rewards.items())
        h.update(_packed((self.env, self.turns, self.stop_reason, parts)))
        for row in self.rows:
            row.hash_into(h)
        if 0 < len(self.turn_rewards) <= MAX_TURNS_RECORDED:  # more of them are not sent
            h.update(_packed([(float(turn.reward), turn.spans, turn.state) for turn in self.turn_rewards]))
        if self.hint:
            h.update(_packed(("hint", self.hint)))
        return h.hexdigest()


def episode_seconds(trajectory: Trajectory) -> float:
    """How long its episode took, as its actors measured it: a resumed one with the turns of earlier attempts."""
    turns = sum(turn.generate + (turn.environment or 0.0) for turn in trajectory.turn_records)
    return max(float(trajectory.timings.get("total", 0.0)), turns)
