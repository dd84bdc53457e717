"""The slots in force through outcomes, repeats, kills and branches, on the buffer's core; and what the audit sees."""

from __future__ import annotations

import importlib
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.audit.checks.slots import slots
from asyncrl.audit.reading import read_ledger
from asyncrl.audit.witnesses import Bounds
from asyncrl.buffer.bounds.automatic import Auto, Ended
from asyncrl.buffer.bounds.changes import Changes
from asyncrl.buffer.bounds.slots import SlotLimits
from asyncrl.buffer.client.messages import Told
from asyncrl.buffer.core import Buffer
from asyncrl.trajectory import Ticket
from tests.buffer.fakes import learner, open_buffer, put, reopen, trajectory

LIMITS = SlotLimits(1, 8, 3)
AUTO = Auto(0, 8, 8)
GIVEN: dict[str, Any] = {"auto": AUTO, "max_staleness": 8, "tuning": LIMITS}
BOUNDS = Bounds(2, 1, 8, "drop", 0.5, auto=AUTO, tuning=LIMITS)


def wished(limits: SlotLimits, line: Sequence[Ended]) -> tuple[int, str]:
    """A fake choice: the seconds of the last batch are the number of slots."""
    before = line[-2].tuned if len(line) > 1 else None
    now = limits.start if before is None else before.slots
    value = now if line[-1].measures is None else limits.within(round(line[-1].measures.seconds))
    return value, "" if value == now else "it is wished"


@pytest.fixture(autouse=True)
def _wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.buffer.tickets.slots_in_force.slots_after", wished)
    monkeypatch.setattr(importlib.import_module("asyncrl.audit.checks.slots"), "slots_after", wished)


def issue(buffer: Buffer, credits: int = 20, actor: str = "actor-0") -> list[Ticket]:
    history = buffer.ledger.history
    return buffer.issue(0.0, actor, (history.branch, history.published or 0), credits)[0]


def step(buffer: Buffer, incarnation: int, b: int, number: int, publish: bool = True) -> None:
    """A batch that decides so many slots; what it needs is played before."""
    while (
        sum(group.state == "waiting" for group in buffer.ledger.live.values()) < 2 and buffer.leases.of["actor-0"] == 0
    ):
        for ticket in issue(buffer):
            put(buffer, trajectory(ticket, (ticket.min_version[1],)))
    answer = buffer.batch(0.0, incarnation, b)
    assert answer.batch is not None, answer.why
    version = buffer.finished(incarnation, b, "applied", Told(0.0, 1.0, 0.0, float(number)), 1.0)
    if publish:
        buffer.published(incarnation, buffer.ledger.history.branch, version, f"digest-{version}")


def said(buffer: Buffer, folder: Path, *rules: Bounds) -> list[str]:
    buffer.commit(0.0)
    return list(slots(read_ledger(folder), rules or (BOUNDS,)))


def number(buffer: Buffer) -> int | None:
    return buffer.tickets.bound.slots.number


def test_an_actor_gets_no_more_tickets_than_slots_and_keeps_what_it_holds_when_there_are_fewer(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, **GIVEN)
    incarnation = learner(buffer)
    tickets, why = buffer.issue(0.0, "actor-0", (0, 0), 20)
    assert len(tickets) == 3
    assert why == "actor-0 holds 3 tickets, as many as it may (launch.tuning)"
    for ticket in tickets:
        put(buffer, trajectory(ticket, (0,)))
    step(buffer, incarnation, 0, 7)
    held = issue(buffer)
    assert (number(buffer), len(held)) == (7, 7)
    for ticket in held[:4]:
        put(buffer, trajectory(ticket, (1,)))
    held = [*held[4:], *issue(buffer)]
    assert len(held) == 7
    step(buffer, incarnation, 1, 2)
    assert number(buffer) == 2
    assert issue(buffer) == []
    for ticket in held[:5]:
        put(buffer, trajectory(ticket, (1,)))
    assert issue(buffer) == []
    put(buffer, trajectory(held[5], (1,)))
    assert len(issue(buffer)) == 1
    assert said(buffer, tmp_path) == []


def test_an_actor_that_comes_later_gets_the_slots_in_force(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, **GIVEN)
    incarnation = learner(buffer)
    step(buffer, incarnation, 0, 5)
    assert [len(issue(buffer, actor=name)) for name in ("actor-0", "actor-7")] == [5, 5]


def test_without_tuning_an_actor_decides_itself(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, auto=AUTO, max_staleness=8)
    incarnation = learner(buffer)
    assert len(issue(buffer, 9)) == 9
    assert (number(buffer), buffer.tickets.bound.slots.left("actor-0")) == (None, None)
    for lease in buffer.leases:
        put(
            buffer,
            trajectory(lease.id, (0,), attempt=lease.attempt, task_id=buffer.ledger.live[lease.id.group].task_id),
        )
    step(buffer, incarnation, 0, 5)
    assert buffer.ledger.history.line[0].tuned is None


def test_a_kill_forgets_no_decision_and_a_repeat_decides_nothing(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, **GIVEN)
    incarnation = learner(buffer)
    step(buffer, incarnation, 0, 6)
    made = buffer.ledger.history.line[0].tuned
    buffer.finished(incarnation, 0, "applied", Told(0.0, 1.0, 0.0, 2.0), 2.0)
    buffer = reopen(buffer, tmp_path, **GIVEN)
    assert buffer.ledger.history.line[0].tuned == made
    assert number(buffer) == 6
    assert said(buffer, tmp_path) == []


def test_a_branch_starts_from_the_slots_of_its_checkpoint_and_other_limits_hold_at_once(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, **GIVEN)
    incarnation = learner(buffer)
    for b, wish in enumerate((6, 4, 7)):
        step(buffer, incarnation, b, wish)
    learner(buffer, 1, 1, branch=0, fresh=True)
    assert (buffer.ledger.history.branch, number(buffer)) == (1, 6)
    assert len(issue(buffer)) == 6
    assert said(buffer, tmp_path) == []
    buffer = reopen(buffer, tmp_path, **(GIVEN | {"tuning": SlotLimits(1, 5, 3)}))
    assert number(buffer) == 5


def test_batches_that_a_branch_takes_over_keep_their_decisions(tmp_path: Path) -> None:
    """Steps were redone and gave other weights; of three versions only the last one had been published."""
    buffer = open_buffer(tmp_path, **GIVEN)
    incarnation = learner(buffer)
    for b, wish in enumerate((6, 4, 5)):
        step(buffer, incarnation, b, wish, publish=b == 2)
    again = learner(buffer, 0, 0, publish=False, branch=0)
    for b in range(3):
        buffer.batch(0.0, again, b)
        buffer.finished(again, b, "applied", Told(0.0, 1.0, 0.0, 1.0), 3.0)
    assert buffer.published(again, 0, 3, "other") == 1
    assert buffer.published(again, 1, 3, "other") == 1
    assert [batch.tuned and batch.tuned.slots for batch in buffer.ledger.history.line] == [6, 4, 5]
    assert len(issue(buffer)) == 5
    step_on = buffer.ledger.history.line[-1]
    assert (step_on.branch, step_on.tuned and step_on.tuned.lent) == (1, buffer.ledger.attempts - 5)
    assert said(buffer, tmp_path) == []


def test_each_change_is_told_once(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, **GIVEN)
    incarnation = learner(buffer)
    changes = Changes(buffer.ledger)
    for b, wish in enumerate((3, 6, 6)):
        step(buffer, incarnation, b, wish)
    assert [each for each in changes.news() if each[0] == "slots"] == [("slots", 2, 6, "it is wished")]
    assert list(changes.news()) == []


CHANGED = {
    "UPDATE batches SET slots = 5 WHERE b = 1": "decides 5 slots",
    "UPDATE batches SET slots_why = 'so' WHERE b = 1": "decides 8 slots (so)",
    "UPDATE batches SET slots = NULL, slots_why = NULL, lent = NULL WHERE b = 1": "has no decision about the slots",
    "UPDATE batches SET lent = 0 WHERE b = 1": "ended after 0 attempts were issued",
    "UPDATE batches SET lent = 999 WHERE b = 1": "ended after 999 attempts were issued",
    "UPDATE attempts SET ended_serial = NULL WHERE serial = 0": "has ended (stored) after None were issued",
    "UPDATE attempts SET ended_serial = 0 WHERE serial = 0": "has ended (stored) after 0 were issued",
    "UPDATE attempts SET ended_serial = 999 WHERE serial = 0": "has ended (stored) after 999 were issued",
    "UPDATE attempts SET ended_serial = 9 WHERE serial < 3": "actor-0 held",
}


@pytest.mark.parametrize("statement", CHANGED)
def test_the_audit_notices_what_was_changed(tmp_path: Path, statement: str) -> None:
    buffer = open_buffer(tmp_path, **GIVEN)
    incarnation = learner(buffer)
    for b, wish in enumerate((3, 8, 4)):
        step(buffer, incarnation, b, wish)
    issue(buffer)
    assert said(buffer, tmp_path) == []
    buffer.database.close()
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as ledger, ledger:
        assert ledger.execute(statement).rowcount
    found = list(slots(read_ledger(tmp_path), (BOUNDS,)))
    assert any(CHANGED[statement] in text for text in found), found


def test_a_buffer_that_lends_more_than_the_slots_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = open_buffer(tmp_path, **GIVEN)
    learner(buffer)
    monkeypatch.setattr("asyncrl.buffer.tickets.slots_in_force.SlotsInForce.left", lambda self, actor: None)
    issue(buffer, 4)
    assert said(buffer, tmp_path) == ["actor-0 held 4 tickets with attempt 3 of all, and 3 slots were in force"]
    assert said(buffer, tmp_path, BOUNDS, replace(BOUNDS, tuning=SlotLimits(1, 8, 4))) == []
    assert said(buffer, tmp_path, BOUNDS, replace(BOUNDS, tuning=None)) == []
