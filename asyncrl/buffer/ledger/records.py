"""Groups and their trajectories as rows of the ledger's tables, and back."""

from __future__ import annotations

import struct
from itertools import chain

from asyncrl.buffer.ledger.database import Database
from asyncrl.buffer.ledger.group import Group, Received
from asyncrl.buffer.ledger.payloads import Location

_GROUP = "number, branch, draw, task_id, size, state, replaces, reason, weight, uses, task, curriculum, measured"
_TRAJECTORY = (
    "grp, idx, attempt, actor, digest, segment, start, bytes, checksum, versions, tokens, policy_tokens, turns, "
    "reward, env, stop_reason"
)
_INSERT_TRAJECTORY = f"INSERT INTO trajectories({_TRAJECTORY}, received_at) VALUES ({', '.join('?' * 17)})"


def insert_group(db: Database, g: Group) -> None:
    values = (g.number, g.branch, g.draw, g.task_id, g.size, g.state, g.replaces, g.reason, g.weight, g.uses)
    drawn = (g.task, g.curriculum, g.measured)
    db.write(f"INSERT INTO groups({_GROUP}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (*values, *drawn))


def insert_trajectory(db: Database, number: int, index: int, r: Received) -> None:
    at = r.location
    versions = struct.pack(f"<{2 * len(r.versions)}q", *chain.from_iterable(r.versions))
    identity = (number, index, r.attempt, r.actor, r.digest, at.segment, at.start, at.bytes, at.checksum, versions)
    totals = (r.tokens, r.policy_tokens, r.turns, r.reward, r.env, r.stop_reason)
    db.write(_INSERT_TRAJECTORY, (*identity, *totals, db.wall_clock()))


def read_groups(db: Database, where: str, values: tuple[int, ...] = ()) -> dict[int, Group]:
    """Groups by number, in issue order; `where` is a condition on `groups g`."""
    groups: dict[int, Group] = {}
    for row in db.read(f"SELECT {_GROUP} FROM groups g WHERE {where} ORDER BY number", values):
        group = Group(*row)
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
        segment, start, size, checksum, versions, tokens, _, turns, reward, env, stop_reason = rest
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
        )
        groups[number].store(idx, received)
    return groups
