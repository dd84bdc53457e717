"""Groups and their trajectories as rows of the ledger's tables, and back; batches and incarnations as they are read."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from asyncrl.buffer.client.messages import Outcome
from asyncrl.buffer.ledger.group import Group, Received
from asyncrl.buffer.ledger.storage.database import Database
from asyncrl.buffer.ledger.storage.payloads import Location
from asyncrl.trajectory import LogHead

_GROUP = (
    "number, branch, draw, task_id, size, state, replaces, reason, weight, uses, task, curriculum, measured, durable, "
    "task_env, lengths"
)
_TRAJECTORY = (
    "grp, idx, attempt, actor, digest, segment, start, bytes, checksum, versions, tokens, policy_tokens, turns, "
    "reward, env, stop_reason, line, head"
)
_INSERT_TRAJECTORY = f"INSERT INTO trajectories({_TRAJECTORY}, received_at) VALUES ({', '.join('?' * 19)})"


def insert_group(db: Database, g: Group) -> None:
    values = (g.number, g.branch, g.draw, g.task_id, g.size, g.state, g.replaces, g.reason, g.weight, g.uses)
    drawn = (g.task, g.curriculum, g.measured, g.durable, g.task_env, g.lengths)
    db.write(f"INSERT INTO groups({_GROUP}) VALUES ({', '.join('?' * 16)})", (*values, *drawn))


def insert_trajectory(db: Database, number: int, index: int, r: Received) -> None:
    at = r.location
    versions = struct.pack(f"<{2 * len(r.versions)}q", *chain.from_iterable(r.versions))
    identity = (number, index, r.attempt, r.actor, r.digest, at.segment, at.start, at.bytes, at.checksum, versions)
    totals = (r.tokens, r.policy_tokens, r.turns, r.reward, r.env, r.stop_reason)
    logged = (None, None) if r.logged is None else (r.logged.line, r.logged.digest)
    db.write(_INSERT_TRAJECTORY, (*identity, *totals, *logged, db.wall_clock()))


def read_groups(db: Database, where: str, values: tuple[int, ...] = ()) -> dict[int, Group]:
    """Groups by number, in issue order; `where` is a condition on `groups g`."""
    groups: dict[int, Group] = {}
    for row in db.read(f"SELECT {_GROUP} FROM groups g WHERE {where} ORDER BY number", values):
        group = Group(*row)
        group.durable = bool(group.durable)
        groups[group.number] = group
    for number, idx, attempts, failures in db.read(
        "SELECT grp, idx, max(attempt) + 1, sum(ended IS 'failed') "
        f"FROM groups g JOIN attempts ON grp = number WHERE {where} GROUP BY grp, idx",
        values,
    ):
        groups[number].attempts[idx], groups[number].failures[idx] = attempts, failures
    for number, idx, attempt, actor, digest, *rest in db.read(
        f"SELECT {_TRAJECTORY} FROM groups g JOIN trajectories ON grp = number WHERE {where}", values
    ):
        segment, start, size, checksum, versions, tokens, _, turns, reward, env, stop_reason, line, head = rest
        pairs = iter(struct.unpack(f"<{len(versions) // 8}q", versions))
        received = Received(
            attempt=attempt,
            actor=actor,
            digest=digest,
            location=Location(segment, start, size, checksum),
            versions=tuple(zip(pairs, pairs, strict=True)),
            tokens=tokens,
            turns=turns,
            reward=reward,
            env=env,
            stop_reason=stop_reason,
            logged=None if line is None else LogHead(line, head),
        )
        groups[number].store(idx, received)
    return groups


@dataclass(frozen=True, slots=True)
class Drawn:
    """A used group in a batch."""

    group: int
    """Its number."""
    chance: float
    """p_g"""
    weight: float
    """w_g, the factor of the group's loss: above 0, at most 1."""


@dataclass(frozen=True, slots=True)
class Draw:
    """The used groups of one batch."""

    candidates: int = 0
    """N"""
    drawn: tuple[Drawn, ...] = ()
    """In issue order."""

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(one.group for one in self.drawn)


NOTHING = Draw()


@dataclass(frozen=True, slots=True)
class Measures:
    """What is known of a batch when it ends, for `buffer.max_staleness: auto`. Shares, but the last two."""

    waited: float
    """Of the time since the batch before it ended: how long the learner waited for it."""
    idle: float
    """Of the slots in that time: those to which admission gave no ticket."""
    stale: float
    """Of the groups that ended while it was filled: those dropped as stale."""
    ess: float
    """Effective sample size of its rows."""
    lr: float
    seconds: float = 0.0
    """Since the batch before it ended, by the learner's clock."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What the end of a batch decided about the bound on staleness."""

    target: int
    """The bound under which groups are admitted from then on."""
    bound: int
    """Of the next batch: larger than `target` while groups wait that were admitted under a larger one."""
    since: int
    """Groups from this number on were admitted after the target was last lowered."""
    why: str
    """The target is another one; empty: it is the same."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """What the end of a batch decided about the actors' slots (`launch.tuning: auto`)."""

    slots: int
    """Tickets that one actor may hold from then on."""
    lent: int
    """Attempts at tickets that were issued before."""
    why: str
    """It is another number; empty: it is the same."""


@dataclass(slots=True)
class Batch:
    serial: int
    b: int
    branch: int
    version: int
    """The learner's version when the batch was fixed."""
    incarnation: int
    first_uses: int
    groups: tuple[int, ...]
    """In training order."""
    outcome: Outcome | None = None
    replay: Draw = NOTHING
    """Those of its groups that it got beside its new ones."""
    bound: int = 0
    """S_b: no token that carries loss is older, in training steps."""
    measures: Measures | None = None
    """None: the bound was fixed, or the batch was given up."""
    decision: Decision | None = None
    """Of the bound after it; None: it was fixed."""
    tuned: Tuned | None = None
    """Of the slots after it; None: they are not tuned."""

    @property
    def version_after(self) -> int:
        return self.version + (self.outcome == "applied")


def last_ended(line: Sequence[Batch]) -> Batch | None:
    """The last batch of the line that has an outcome; only the last one can have none."""
    ended = len(line) - (bool(line) and line[-1].outcome is None)
    return line[ended - 1] if ended else None


@dataclass(slots=True)
class Incarnation:
    incarnation: int
    branch: int
    next_batch: int
    version: int
    holds: int | None = None
    """The batch handed out to it and not finished; if the incarnation dies, this batch is suspected."""
    caused: bool = False
    settings: str = "{}"
    """JSON: what decides the result of its training steps (`asyncrl.config.resuming`)."""


def read_line(db: Database) -> list[Batch]:
    """The batches that no fork released, in order, each with its groups in training order."""
    groups: dict[int, list[int]] = {}
    for serial, number in db.read("SELECT serial, grp FROM uses ORDER BY serial, place"):
        groups.setdefault(serial, []).append(number)
    replayed: dict[int, list[Drawn]] = {}
    for serial, *drawn in db.read("SELECT serial, grp, chance, weight FROM replays ORDER BY serial, grp"):
        replayed.setdefault(serial, []).append(Drawn(*drawn))
    columns = "serial, b, branch, version, incarnation, first_uses, outcome, candidates"
    line = []
    for serial, b, branch, version, incarnation, first_uses, outcome, candidates, *about in db.read(
        f"SELECT {columns}, {BOUND}, {SLOTS} FROM batches WHERE released = 0 ORDER BY b"
    ):
        held, replay = tuple(groups.get(serial, ())), Draw(candidates, tuple(replayed.get(serial, ())))
        at = serial, b, branch, version, incarnation, first_uses
        *bound, slots, lent, why = about
        line.append(Batch(*at, held, outcome, replay, *of_bound(*bound), of_slots(slots, lent, why)))
    return line


BOUND = "bound, measures, target, next_bound, since, why"
"""Columns of a batch."""
SLOTS = "slots, lent, slots_why"
"""Columns of a batch under `launch.tuning: auto`."""


def of_bound(
    bound: int, measures: str | None, target: int | None, next_bound: int | None, since: int | None, why: str | None
) -> tuple[int, Measures | None, Decision | None]:
    """Bound, measures and decision of a batch from its columns. Raises ValueError if they are damaged."""
    match target, next_bound, since, why:
        case None, None, None, None:
            decision = None
        case int(), int(), int(), str():
            decision = Decision(target, next_bound, since, why)
        case columns:
            raise ValueError(
                f"target, next_bound, since and why are {columns}; expected 3 integers and a text, or 4 NULL"
            )
    if measures is None:
        return bound, None, decision
    if decision is None:
        raise ValueError(f"measures are {measures}, and no decision follows from them")
    try:
        return bound, Measures(**{k: float(v) for k, v in json.loads(measures).items()}), decision
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"measures are {measures}, which cannot be read: {error}") from error


def of_slots(slots: int | None, lent: int | None, why: str | None) -> Tuned | None:
    """What a batch decided about the slots, from its columns. Raises ValueError if they are damaged."""
    match slots, lent, why:
        case None, None, None:
            return None
        case int(), int(), str():
            return Tuned(slots, lent, why)
    raise ValueError(f"slots, lent and slots_why are {slots, lent, why}; expected 2 integers and a text, or 3 NULL")


def furthest(db: Database) -> tuple[int, int]:
    """The largest batch number and version that a learner of this run has reached, on a branch that was left too."""
    rows = "SELECT b + 1 AS batch, version + 1 AS version FROM batches UNION ALL SELECT batch, version FROM checkpoints"
    batch, version = next(iter(db.read(f"SELECT ifnull(max(batch), 0), ifnull(max(version), 0) FROM ({rows})")))
    return batch, version


def read_incarnations(db: Database) -> list[Incarnation]:
    columns = "incarnation, branch, next_batch, version, holds, caused, settings"
    return [Incarnation(*row) for row in db.read(f"SELECT {columns} FROM incarnations ORDER BY incarnation")]


def one(db: Database, sql: str, values: tuple[Any, ...] = ()) -> Any:
    """The only column of the first row."""
    return next(iter(db.read(sql, values)))[0]


def lose_payload(db: Database, number: int, index: int) -> None:
    """The disk lost the arrays of a trajectory of a group that is in no batch any more; its row stays."""
    db.write("UPDATE groups SET payload = 0 WHERE number = ?", (number,))
    db.write("UPDATE attempts SET ended = 'lost' WHERE grp = ? AND idx = ? AND ended = 'stored'", (number, index))
