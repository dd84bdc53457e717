"""The audit draws again what was replayed: a buffer that decides otherwise than it says is noticed."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.audit.checks import violations
from asyncrl.buffer.batches import batches
from asyncrl.buffer.ledger.records import NOTHING
from asyncrl.buffer.replaying import PRIORITIES, Replaying, draw
from asyncrl.buffer.tickets.places import Places
from tests.audit.histories.batches import replayed
from tests.audit.simulated import Simulated
from tests.buffer.fakes import learner


def drawing(change: Callable[[Any], Any], groups: Callable[[list[Any]], list[Any]] = lambda groups: groups) -> Any:
    """The draw under other settings than those of the run, or among other groups."""
    return lambda rules, used, version, rng: draw(change(rules), groups(list(used)), version, rng)


oldest_first = Places._oldest_first
BROKEN: dict[str, tuple[Any, str, Any, str]] = {
    "another seed": (batches, "seed_of", lambda *_: "x", "the seed draws"),
    "candidates left out": (batches, "draw", drawing(lambda r: r, lambda groups: groups[1:]), "candidates; the seed"),
    "no beta": (batches, "draw", drawing(lambda r: replace(r, beta=0.0)), "the seed draws"),
    "another exponent": (batches, "draw", drawing(lambda r: replace(r, exponent=1.0)), "the seed draws"),
    "without age": (batches, "draw", drawing(lambda r: replace(r, half_life=None)), "the seed draws"),
    "fewer": (batches, "draw", drawing(lambda r: replace(r, most=1)), "the seed draws"),
    "none": (batches.Batches, "_replayed", lambda *_: NOTHING, "replays nothing of 0 candidates; the seed draws"),
    "the newest yield": (Places, "_oldest_first", lambda self: oldest_first(self)[::-1], "is recorded as yielded at"),
}


def test_what_was_drawn_as_the_settings_say_passes(tmp_path: Path) -> None:
    assert list(violations(replayed(tmp_path).evidence())) == []


@pytest.mark.parametrize("what", BROKEN)
def test_what_was_drawn_otherwise_is_named(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *changed, says = BROKEN[what]
    monkeypatch.setattr(*changed)
    said = [str(violation) for violation in violations(replayed(tmp_path).evidence())]
    assert any(text.startswith("replays: ") and says in text for text in said), said


def test_a_group_that_was_generated_again_is_not_judged_by_what_it_had_before(tmp_path: Path) -> None:
    """It ended as stale, a branch brought it back unused, and a power cut took it: it has newer tokens now."""
    run = Simulated(tmp_path, max_uses=3)
    tickets = run.issue(4)
    for ticket in tickets:
        run.put(ticket)
    run.step()
    run.rounds(2)
    assert {row[0] for row in run.buffer.database.read("SELECT grp FROM retired WHERE why = 'stale'")} >= {0}
    run.fork(0, 0)
    run.buffer.commit(0)
    run.buffer.database.close()
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db:
        stored = db.execute("SELECT segment, start FROM trajectories WHERE grp = 0").fetchall()
        assert db.execute("SELECT state, uses FROM groups WHERE number = 0").fetchone() == ("waiting", 0)
    for segment, start in stored:
        with (tmp_path / "payloads" / f"{segment:08d}.segment").open("r+b") as file:
            file.seek(start)
            file.write(b"\xff")
    run.buffer = run.open()
    assert run.buffer.lost_to_disk == 2
    run.incarnation = learner(run.buffer, branch=1)
    held = run.issue(2)
    assert {ticket.id.group for ticket in held} == {0}
    run.rounds(1)
    run.buffer.release("actor-0", [(ticket.id, ticket.attempt) for ticket in held])
    run.rounds(3)
    assert run.buffer.ledger.load(0).oldest == 1
    said = [str(v) for v in violations(run.evidence()) if v.check in ("replays", "drops", "uses", "equation")]
    assert said == []


def test_the_end_of_a_batch_that_a_branch_took_over_is_not_the_former_one_s(tmp_path: Path) -> None:
    """A branch redid batch 0, took batch 1 over, and its guard refused it: the groups ended with that. The draws of the
    former branch, where batch 1 was applied, had them as candidates all the same."""
    run = Simulated(tmp_path, replay=Replaying(1, PRIORITIES["uniform"]), max_uses=4, max_staleness=3)
    run.rounds(4)
    run.fork(0, 0, "digest")
    run.rounds(1)
    for ticket in run.issue(6):
        run.put(ticket)
    run.step("guard")
    assert [batch.outcome for batch in run.buffer.ledger.history.line] == ["applied", "guard"]
    assert [str(violation) for violation in violations(run.evidence())] == []
