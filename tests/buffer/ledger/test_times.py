"""The times in the ledger are those of the clock that the database was given, and decide nothing."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.buffer.fakes import learner, open_buffer, play, put, step, trajectory

TIMES = {
    "attempts": ("issued_at", "ended_at"),
    "groups": ("ended_at",),
    "trajectories": ("received_at",),
    "batches": ("fixed_at", "finished_at"),
    "published": ("at",),
    "checkpoints": ("at",),
}


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def rows(folder: Path, table: str) -> list[dict[str, Any]]:
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as db:
        db.row_factory = sqlite3.Row
        return [dict(row) for row in db.execute(f"SELECT * FROM {table}")]


def live_through(folder: Path, clock: Clock, passes: Callable[[], None]) -> None:
    """A run with an applied step, a refused one, a failed and an open attempt, a checkpoint and a second learner."""
    buffer = open_buffer(folder / "buffer", wall_clock=clock)
    passes()
    incarnation = learner(buffer)
    passes()
    tickets, _ = buffer.issue(0, "actor-0", (0, 0), 100)
    passes()
    for ticket in tickets[:-1]:
        put(buffer, trajectory(ticket))
    buffer.fail("actor-0", tickets[-1].id, tickets[-1].attempt, "env_error", "away")
    passes()
    assert buffer.batch(0, incarnation, 0).state == "ready"
    passes()
    buffer.finished(incarnation, 0, "applied")
    passes()
    buffer.published(incarnation, 0, 1, "digest-1")
    passes()
    (folder / "step-1").mkdir()
    assert buffer.checkpointed(0, incarnation, 1, 1, folder / "step-1")
    passes()
    play(buffer)
    assert buffer.batch(0, incarnation, 1).state == "ready"
    buffer.finished(incarnation, 1, "guard")
    buffer.start(1, 1, 0)
    buffer.commit(0)
    buffer.database.close()


def test_each_row_has_the_time_of_its_event(tmp_path: Path) -> None:
    clock = Clock()

    def passes() -> None:
        clock.now += 10

    live_through(tmp_path, clock, passes)
    folder = tmp_path / "buffer"
    first = [a for a in rows(folder, "attempts") if a["grp"] == 0]
    assert {(a["issued_at"], a["ended_at"]) for a in first} == {(1020.0, 1030.0)}
    assert {t["received_at"] for t in rows(folder, "trajectories") if t["grp"] == 0} == {1030.0}
    batches = rows(folder, "batches")
    assert [(b["fixed_at"], b["finished_at"]) for b in batches] == [(1040.0, 1050.0), (1080.0, 1080.0)]
    assert [(p["version"], p["at"]) for p in rows(folder, "published")] == [(0, 1010.0), (1, 1060.0)]
    assert [c["at"] for c in rows(folder, "checkpoints")] == [1070.0]
    trained = [g["ended_at"] for g in rows(folder, "groups") if g["state"] == "trained"]
    assert trained == [1050.0, 1050.0]
    assert all((g["ended_at"] is None) == (g["state"] in ("in_flight", "waiting")) for g in rows(folder, "groups"))
    failed = next(a for a in rows(folder, "attempts") if a["ended"] == "failed")
    assert failed["ended_at"] == 1030.0


def test_a_repeat_keeps_the_first_time(tmp_path: Path) -> None:
    clock = Clock()
    buffer = open_buffer(tmp_path, wall_clock=clock)
    incarnation = learner(buffer)
    tickets = play(buffer)
    step(buffer, incarnation, 0)
    clock.now = 5_000.0
    assert put(buffer, trajectory(tickets[0], (0,), 0.0)) == "duplicate"
    buffer.batch(0, incarnation, 0)
    buffer.finished(incarnation, 0, "applied")
    buffer.published(incarnation, 0, 1, "digest-1")
    second = buffer.start(0, 0, None).incarnation  # the batch is redone
    buffer.batch(0, second, 0)
    buffer.finished(second, 0, "applied")
    buffer.commit(0)
    buffer.database.close()
    kept = [row[name] for table, names in TIMES.items() for row in rows(tmp_path, table) for name in names]
    assert set(kept) <= {1_000.0, None}


def test_a_group_whose_use_was_undone_has_not_ended(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, wall_clock=Clock())
    incarnation = learner(buffer)
    play(buffer)
    used = step(buffer, incarnation, 0)
    buffer.start(0, 0, None, fresh=True)
    buffer.commit(0)
    buffer.database.close()
    groups = {g["number"]: g for g in rows(tmp_path, "groups")}
    assert {(groups[n]["state"], groups[n]["ended_at"]) for n in used} == {("waiting", None)}


@pytest.mark.parametrize("seed", range(5))
def test_a_clock_that_jumps_changes_nothing_else(tmp_path: Path, seed: int) -> None:
    rng, steady, jumping = random.Random(seed), Clock(), Clock()

    def jumps() -> None:
        jumping.now += rng.uniform(-1e6, 1e6)

    for name, clock, passes in (("steady", steady, lambda: None), ("jumping", jumping, jumps)):
        (tmp_path / name).mkdir()
        live_through(tmp_path / name, clock, passes)
    with closing(sqlite3.connect(tmp_path / "steady" / "buffer" / "ledger.sqlite")) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for table in tables:
        found = []
        for name in ("steady", "jumping"):
            kept = rows(tmp_path / name / "buffer", table)
            for row in kept:
                row.pop("path", None)
                for column in (TIMES | {"commits": ("changes", "head")}).get(table, ()):
                    row.pop(column)
            found.append(kept)
        assert found[0] == found[1], table
