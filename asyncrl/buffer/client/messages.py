"""What travels between the buffer and its clients: one structure per request and per reply, used by both ends.

A request is [header, *frames]; its header is one of the structures below, with its `op` and its number `n`. The reply
is [header, *frames]; its header is a ReplyHeader. Arrays travel as frames: a put and a batch carry one record per
trajectory, recorded turns one each. client/codec.py encodes and decodes them.

Every request may be sent again: the buffer answers a repeat as it answered the first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec

from asyncrl.buffer.client.pages import Page, Serial
from asyncrl.success import Success
from asyncrl.trajectory import (
    Attempt,
    Branch,
    Count,
    GroupIndex,
    GroupNumber,
    Lease,
    LogHead,
    Ticket,
    TicketId,
    Trajectory,
)
from asyncrl.user_errors import Cause
from asyncrl.wire.teacher_scores import GroupScores

T = TypeVar("T")

MAX_PUTS = 64
"""Trajectories in one put."""

PutOutcome = Literal["stored", "duplicate", "late"]
ScoreOutcome = PutOutcome
MAX_SCORED = 256
"""Groups that one scorer may hold."""
TurnOutcome = Literal["stored", "revoked", "full"]
"""revoked: the attempt does not hold the ticket: nothing is stored, and its episode ends before it steps. full: the
disk has no room for it: nothing is stored, and the episode goes on without further records."""
Outcome = Literal["applied", "guard", "poison"]
BatchState = Literal["ready", "waiting", "skipped", "ended"]

MOST = "most"
"""Key in the metadata of a number, or of a list: the name of its largest value, or of its largest length, in
buffer/limits.py, which takes it from the run's configuration."""


def _up_to(most: str, least: int = 0) -> msgspec.Meta:
    return msgspec.Meta(ge=least, le=2**53, extra={MOST: most})


_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=86_400.0)]
_Name = Annotated[str, msgspec.Meta(max_length=256)]
_Text = Annotated[str, msgspec.Meta(max_length=4096)]
_Leases = Annotated[Sequence[Lease], msgspec.Meta(max_length=1 << 20, extra={MOST: "leases"})]
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Incarnation = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Version = Annotated[int, _up_to("version")]
_Batch = Annotated[int, _up_to("batch")]
Weights = tuple[
    Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)],
    Annotated[int, _up_to("version", least=-1)],
]
"""(branch, version); an actor without weights has (-1, -1)."""


class Refusal(msgspec.Struct, frozen=True):
    """Why the buffer refused a request, or one of several puts."""

    code: str
    message: str


# Replies


class ReplyHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    n: int
    reply: msgspec.Raw = msgspec.Raw()
    error: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """Where the ledger's history stands."""

    branch: int
    version: int
    published: int | None
    """Latest version published on this branch."""


@dataclass(frozen=True, slots=True)
class TicketReply:
    tickets: list[Ticket]
    why: str
    """If there are fewer tickets than credits: what the buffer is waiting for."""
    hold: tuple[int, int] | None = None
    """The weights to hold, (branch, version): an evaluation is pinned to them that this actor plays, or it has nothing
    else to do. None: the newest."""
    turns: Sequence[tuple[Count, Count]] = ()
    """Indices into `tickets`, each with the number of its recorded turns, whose frames come in this order."""
    slots: Count | None = None
    """Tickets that this actor may hold from now on; None: it decides itself (`launch.tuning`)."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A chat that a batch takes of `data.demonstrations`."""

    draw: Count
    """0, 1, 2 ... over the run."""
    where: str
    """File and line, for messages."""
    digest: str
    chat: bytes = b""
    """JSON (`asyncrl.data.demonstrations.chat`). It travels as a frame."""


@dataclass(frozen=True, slots=True)
class GroupLease:
    """A complete group that a scorer is to score."""

    branch: int
    group: int
    attempt: int
    digests: tuple[str, ...]
    """Digests of its trajectories, by index. The trajectories travel as frames, group by group."""


@dataclass(frozen=True, slots=True)
class ScoringReply:
    groups: tuple[GroupLease, ...]
    why: str
    """If there are fewer groups than credits: what the buffer is waiting for."""
    revoked: tuple[tuple[int, int], ...] = ()
    """(group, attempt) of leases that the scorer holds no longer."""
    trajectories: list[Trajectory] = dataclasses.field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BatchReply:
    state: BatchState
    """ready; waiting: ask again; skipped: go on with b + 1; ended: there will be no batch b."""
    why: str
    trajectories: list[Trajectory]
    """This rank's share, group by group. They travel as frames."""
    weights: tuple[float, ...]
    """One per trajectory: 0 if a filter rejected its group but it was kept; it is trained with advantage 0."""
    digests: tuple[str, ...]
    """One per trajectory."""
    groups: tuple[int, ...]
    """Numbers of all groups of the batch, in training order."""
    replayed: tuple[tuple[int, float], ...]
    """The used groups among these, beside the new ones, each with the factor of its loss (`buffer.replay`)."""
    version: int
    """The learner's version that the batch is trained on."""
    branch: int
    """The branch now: weights are published under it."""
    mask_before: int | None
    """Tokens of an older version carry no loss (`over_age: mask`)."""
    checkpoint: bool
    """The disk fills up: write a checkpoint soon, so that payloads can be released."""
    failed: bool
    """True with state `ended` if the run failed (exit code 1)."""
    bound: int = 0
    """No token that carries loss is more training steps old."""
    demonstrations: tuple[Demonstration, ...] = ()
    """All of the batch, whatever the rank. Their chats travel as frames behind the trajectories'."""
    score_digests: tuple[str, ...] = ()
    """Digests of the scores of each group in this rank's share (`learner.teacher.scored_by: servers`)."""
    scores: list[GroupScores] = dataclasses.field(default_factory=list)
    """The scores. They travel as frames behind the chats."""


@dataclass(frozen=True, slots=True)
class Start:
    incarnation: int
    branch: int
    batch: int
    """The batch number to ask for first."""
    version: int
    published: int
    """Latest version published on this branch; -1: none, so publish at once."""
    why: str = ""
    """Why the branch began, if this start began it."""


@dataclass(frozen=True, slots=True)
class EvalSetReply:
    serial: int
    name: str
    branch: int
    due: int
    """With branch and name its identity: the version at which it was due."""
    version: tuple[int, int]
    """The weights that play it."""
    state: Literal["open", "done", "restarted", "failed"]
    measures: Mapping[str, Success]
    """By way of sampling; of a set that is done."""
    failed: int
    """Episodes that failed in their environment."""
    skipped: int
    """How often this set was skipped so far, over all steps."""
    seconds: float
    failure: str = ""
    """Why the last of the failed episodes failed; empty after a restart of the buffer."""


@dataclass(frozen=True, slots=True)
class EvalReply:
    done: bool
    """No set is open."""
    pinned: tuple[int, int] | None
    """The version that must stay fetchable."""
    finished: int
    """Episodes of the open sets."""
    total: int
    sets: list[EvalSetReply]
    """Those of the latest evaluation and of the one before it, each as it was begun last."""
    why: str
    """What the open sets wait for."""
    failed: bool = False
    """They will not be done, for the reason `why`: the run ends."""
    results: Sequence[tuple[int, int, float]] = ()
    """Branch and version of evaluated weights, and their success, from the best on (`eval.keep_best`)."""
    undecided: Sequence[tuple[int, int]] = ()
    """Branch and version of weights that may become the best: they are being evaluated."""


@dataclass(frozen=True, slots=True)
class RecordReply:
    trajectory: Trajectory | None
    """None: its payload is not kept. It travels as a frame."""


_Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


@dataclass(frozen=True, slots=True)
class Told:
    """What the learner measured of a batch that ended, for `buffer.max_staleness: auto`."""

    waited: _Share
    """Share of the time since the batch before it ended in which the learner waited for this one."""
    ess: _Share
    """Effective sample size of the rows' importance weights."""
    lr: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]
    seconds: Annotated[float, msgspec.Meta(ge=0.0, le=1e9)] = 0.0
    """Since the batch before it ended."""


# Requests


def _op(name: str) -> str:
    return name.removesuffix("Request").lower()


class Request(msgspec.Struct, Generic[T], frozen=True, kw_only=True, tag_field="op", tag=_op):
    """Answered with a T."""

    n: _Number = -1
    """Number of the request, unique in its client; set when it is sent."""

    @property
    def op(self) -> str:
        return _op(type(self).__name__)


class HelloRequest(Request[Head], frozen=True):
    role: Annotated[str, msgspec.Meta(max_length=64)]
    who: _Name


class TicketsRequest(Request[TicketReply], frozen=True):
    actor: _Name
    held: Weights
    credits: Annotated[int, _up_to("credits")]
    leased: _Leases
    wait_s: _Seconds
    logged: LogHead | None = None
    """How far the actor's log is."""


class RenewRequest(Request[list[Lease]], frozen=True):
    actor: _Name
    leases: _Leases


class PutRequest(Request[list[PutOutcome | Refusal]], frozen=True):
    """Several records in one request cost the buffer less than one by one; each has its own outcome."""


class TurnRequest(Request[list[TurnOutcome | Refusal]], frozen=True):
    """At most MAX_PUTS recorded turns of the actor's attempts, one per frame; each has its own outcome. Those of one
    attempt come in their order: what is behind a refused one is refused too."""

    actor: _Name


class FailRequest(Request[None], frozen=True):
    actor: _Name
    id: TicketId
    attempt: Attempt
    reason: _Text
    detail: _Text
    place: _Text = ""
    """File and line of the cause, if it is known."""
    outage: bool = False

    @classmethod
    def of(
        cls, actor: str, id: TicketId, attempt: int, reason: str, detail: str, cause: Cause | None = None
    ) -> FailRequest:
        """The request, with texts cut to what one may hold."""
        place, outage = ("", False) if cause is None else (cause.place[-2000:], cause.outage)
        return cls(actor, id, attempt, reason[:200], detail[:2000], place, outage)


class ReleaseRequest(Request[None], frozen=True):
    actor: _Name
    leases: _Leases


_ScoringLeases = Annotated[
    Sequence[tuple[GroupNumber, Attempt]], msgspec.Meta(max_length=1 << 20, extra={MOST: "scoring"})
]


class ScoringRequest(Request[ScoringReply], frozen=True):
    """A scorer asks for complete groups, and renews the leases of those that it holds."""

    scorer: _Name
    credits: Annotated[int, _up_to("scoring")]
    leased: _ScoringLeases
    returned: _ScoringLeases
    """Given back unscored."""
    silent: _Text
    """Why the teacher's servers do not answer; empty: they do."""
    wait_s: _Seconds
    logged: LogHead | None = None
    """How far the scorer's log is."""


class ScoredRequest(Request[ScoreOutcome], frozen=True):
    """Carries the record of one group's scores as a frame."""


class StartRequest(Request[Start], frozen=True):
    """Where a learner would begin. Its numbers are only compared: a checkpoint may be of a history that is lost."""

    batch: _Number
    version: _Number
    branch: Branch | None = None
    fresh: bool = False
    caused: bool = False


class BatchRequest(Request[BatchReply], frozen=True):
    incarnation: _Incarnation
    b: _Batch
    dp_rank: Annotated[int, _up_to("ranks")]
    dp_size: Annotated[int, _up_to("ranks")]
    wait_s: _Seconds

    def __post_init__(self) -> None:
        if self.dp_rank >= self.dp_size:
            raise ValueError(f"dp_rank is {self.dp_rank}, expected less than dp_size = {self.dp_size}")


class FinishedRequest(Request[int], frozen=True):
    incarnation: _Incarnation
    b: _Batch
    outcome: Literal["applied", "guard"]
    told: Told | None = None


class PublishedRequest(Request[int], frozen=True):
    incarnation: _Incarnation
    branch: Branch
    version: _Version
    digest: _Text


class CheckpointedRequest(Request[None], frozen=True):
    incarnation: _Incarnation
    version: _Version
    batch: _Batch
    path: _Text


class EvaluateRequest(Request[None], frozen=True):
    version: Weights


class EvaluationRequest(Request[EvalReply], frozen=True):
    everyone: bool = False
    """The learner waits for what is open: every actor plays it."""
    lost: Weights | None = None
    """These weights can no longer be had."""


class StatusRequest(Request[dict[str, Any]], frozen=True):
    pass


class PageRequest(Request[Page], frozen=True):
    """Committed rows for a reader (`asyncrl view`): groups from a number on, batches from a serial on."""

    group: GroupNumber
    batch: Serial


class RecordRequest(Request[RecordReply], frozen=True):
    """One stored trajectory, for a reader."""

    group: GroupNumber
    index: GroupIndex


class CausedRequest(Request[None], frozen=True):
    pass


class StopRequest(Request[None], frozen=True):
    pass


REQUESTS: tuple[type[Request[Any]], ...] = tuple(Request.__subclasses__())
