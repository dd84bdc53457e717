"""The bound in force through outcomes, repeats, kills and branches, on the buffer's core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.audit.checks.bounds import bounds
from asyncrl.audit.reading import read_ledger
from asyncrl.audit.witnesses import Bounds
from asyncrl.buffer.bounds import automatic
from asyncrl.buffer.bounds.automatic import Auto
from asyncrl.buffer.bounds.changes import Changes
from asyncrl.buffer.client.messages import Told
from asyncrl.buffer.core import Buffer
from asyncrl.config.held_out import HeldOutSet
from asyncrl.trajectory import Ticket
from tests.buffer.bounds.test_changing import LIMIT, jumping
from tests.buffer.fakes import learner, open_buffer, play, put, reopen, trajectory
from tests.buffer.fakes import step as plain_step


@pytest.fixture(autouse=True)
def _jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "target_after", jumping)


def opened(folder: Path, start: int = 3, **changes: Any) -> Buffer:
    return open_buffer(folder, auto=Auto(0, LIMIT, start), max_staleness=LIMIT, **changes)


def step(buffer: Buffer, incarnation: int, b: int, bound: int | None = None, publish: bool = True) -> int:
    """A batch that decides `bound`; None: nothing is told. Gives the bound of the batch."""
    answer = buffer.batch(0.0, incarnation, b)
    assert answer.batch is not None, answer.why
    told = None if bound is None else Told(0.5, 1.0, float(bound))
    version = buffer.finished(incarnation, b, "applied", told, 1.0)
    if publish:
        buffer.published(incarnation, buffer.ledger.history.branch, version, f"digest-{version}")
    return answer.batch.bound


def in_force(buffer: Buffer) -> tuple[int, int]:
    return buffer.tickets.bound.admits, buffer.tickets.bound.holds


def test_a_decrease_acts_on_admission_at_once_and_on_batches_when_the_earlier_groups_are_gone(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    incarnation = learner(buffer)
    assert len(play(buffer)) == 2 * 2 * 4
    step(buffer, incarnation, 0, 0)
    assert in_force(buffer) == (0, 3)
    assert "reach (max_staleness + 1) * groups_per_step = 2" in buffer.issue(0.0, "actor-0", (0, 1), 100)[1]
    assert [step(buffer, incarnation, b, 0) for b in (1, 2, 3)] == [3, 3, 3]
    assert in_force(buffer) == (0, 0)
    assert len(play(buffer)) == 2 * 2
    assert step(buffer, incarnation, 4, 5) == 0
    assert in_force(buffer) == (5, 5)
    assert len(play(buffer)) == 2 * 2 * 6


def test_while_a_batch_is_open_the_decision_before_it_holds(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    incarnation = learner(buffer)
    play(buffer)
    step(buffer, incarnation, 0, 5)
    assert buffer.batch(0.0, incarnation, 1).state == "ready"
    assert in_force(buffer) == (5, 5)


def test_a_repeated_outcome_decides_nothing_and_a_redone_batch_keeps_its_bound(tmp_path: Path) -> None:
    buffer = opened(tmp_path, over_age="mask")
    incarnation = learner(buffer)
    play(buffer)
    bounds = [step(buffer, incarnation, b, bound) for b, bound in enumerate((3, 1, 4))]
    before = [batch.decision for batch in buffer.ledger.history.line]
    buffer.finished(incarnation, 2, "applied", Told(0.5, 1.0, 0.0), 2.0)
    again = learner(buffer, 0, 0, publish=False, branch=0)
    assert [step(buffer, again, b, 0) for b in range(3)] == bounds
    assert [batch.decision for batch in buffer.ledger.history.line] == before
    masked = [buffer.mask_before(batch) for batch in buffer.ledger.history.line]
    assert masked == [max(0, batch.version - batch.bound) for batch in buffer.ledger.history.line]


def test_a_kill_forgets_no_decision(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    incarnation = learner(buffer)
    play(buffer)
    step(buffer, incarnation, 0, 1)
    made = buffer.ledger.history.line[0]
    buffer = reopen(buffer, tmp_path, auto=Auto(0, LIMIT, 3), max_staleness=LIMIT)
    assert in_force(buffer) == (1, 3)
    assert buffer.ledger.history.line[0] == made
    assert made.measures is not None


def test_a_branch_starts_from_the_bound_of_its_checkpoint(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    incarnation = learner(buffer)
    for b, bound in enumerate((2, 5, 4)):
        play(buffer)
        step(buffer, incarnation, b, bound)
    fresh = learner(buffer, 1, 1, branch=0, fresh=True)
    assert buffer.ledger.history.branch == 1
    assert buffer.tickets.bound.admits == 2
    play(buffer)
    assert step(buffer, fresh, 1, 4) == buffer.ledger.history.line[0].decision.bound  # type: ignore[union-attr]


def test_batches_that_a_branch_takes_over_keep_bounds_and_decisions(tmp_path: Path) -> None:
    """Steps were redone and gave other weights; of three versions only the last one had been published."""
    buffer = opened(tmp_path)
    incarnation = learner(buffer)
    play(buffer)
    bounds = [step(buffer, incarnation, b, bound, publish=b == 2) for b, bound in enumerate((5, 1, 4))]
    about = [(batch.groups, batch.bound, batch.measures, batch.decision) for batch in buffer.ledger.history.line]
    assert bounds == [3, 5, 5]
    again = learner(buffer, 0, 0, publish=False, branch=0)
    for b in range(3):
        answer = buffer.batch(0.0, again, b)
        assert answer.batch is not None
        assert answer.batch.bound == bounds[b]
        buffer.finished(again, b, "applied", Told(0.5, 1.0, 0.0), 3.0)
    assert buffer.published(again, 0, 3, "other") == 1
    for opened_again in (False, True):
        if opened_again:
            buffer = reopen(buffer, tmp_path, auto=Auto(0, LIMIT, 3), max_staleness=LIMIT)
        line = buffer.ledger.history.line
        assert [batch.branch for batch in line] == [1, 1, 1]
        assert [(batch.groups, batch.bound, batch.measures, batch.decision) for batch in line] == about


def test_another_configuration_fixes_the_bound_or_lets_it_go(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    incarnation = learner(buffer)
    play(buffer)
    step(buffer, incarnation, 0, 4)
    buffer = reopen(buffer, tmp_path, max_staleness=1)
    assert in_force(buffer) == (1, 1)
    buffer = reopen(buffer, tmp_path, auto=Auto(0, 2, 2), max_staleness=2)
    assert in_force(buffer) == (2, 2), "the limit is lower now"


def test_under_wait_the_bound_is_not_lowered_where_a_group_would_be_too_late(tmp_path: Path) -> None:
    """Group 7 is admitted under the smaller bound, and overtaken by others while the larger one still holds."""
    buffer = opened(tmp_path, over_age="wait")
    incarnation = learner(buffer)
    slow: dict[int, list[Ticket]] = {4: [], 7: []}

    def played(groups: int) -> None:
        held = buffer.ledger.history.branch, buffer.ledger.history.published or 0
        for ticket in buffer.issue(0.0, "actor-0", held, 2 * groups)[0]:
            if ticket.id.group in slow:
                slow[ticket.id.group].append(ticket)
            else:
                put(buffer, trajectory(ticket, (ticket.min_version[1],)))

    played(5)
    assert [step(buffer, incarnation, b, 1) for b in (0, 1)] == [3, 3]
    played(9)
    step(buffer, incarnation, 2, 1)
    played(9)
    for ticket in slow.pop(4):
        put(buffer, trajectory(ticket, (0,)))
    assert step(buffer, incarnation, 3, 1) == 3
    assert 7 in buffer.ledger.live
    assert in_force(buffer) == (1, 3)
    for ticket in slow.pop(7):
        put(buffer, trajectory(ticket, (2,)))
    step(buffer, incarnation, 4, 1)
    assert in_force(buffer) == (1, 1)
    assert buffer.ledger.history.line[4].groups[0] == 7


def test_idle_slots_are_measured_while_admission_refuses(tmp_path: Path) -> None:
    buffer = opened(tmp_path, start=0)
    incarnation = learner(buffer)
    tickets, why = buffer.issue(0.0, "actor-0", (0, 0), 8)
    assert (len(tickets), why.startswith("admission")) == (4, True)
    for ticket in tickets:
        put(buffer, trajectory(ticket, (0,)))
    buffer.issue(10.0, "actor-0", (0, 0), 8)
    assert buffer.batch(10.0, incarnation, 0).state == "ready"
    buffer.finished(incarnation, 0, "applied", Told(0.25, 0.875, 0.0), 20.0)
    measured = buffer.ledger.history.line[0].measures
    assert measured is not None
    assert (measured.waited, measured.idle, measured.stale, measured.ess) == (0.25, 0.75, 0.0, 0.875)


def test_each_change_is_told_once(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    incarnation = learner(buffer)
    changes = Changes(buffer.ledger)
    play(buffer)
    for b, bound in enumerate((3, 5)):
        step(buffer, incarnation, b, bound)
    assert list(changes.news()) == [("bound", 2, 5, "it jumps")]
    assert list(changes.news()) == []


def test_the_change_after_a_batch_that_was_open_when_the_buffer_began_is_told(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    incarnation = learner(buffer)
    play(buffer)
    step(buffer, incarnation, 0, 4)
    assert buffer.batch(0.0, incarnation, 1).state == "ready"
    changes = Changes(buffer.ledger)
    step(buffer, incarnation, 1, 5)
    assert list(changes.news()) == [("bound", 2, 5, "it jumps")]


@pytest.mark.parametrize("began_again", [False, True])
def test_a_change_that_a_branch_takes_over_is_told_once(tmp_path: Path, began_again: bool) -> None:
    buffer = opened(tmp_path)
    incarnation = learner(buffer)
    changes = Changes(buffer.ledger)
    play(buffer)
    for b, bound in enumerate((5, 1, 4)):
        step(buffer, incarnation, b, bound, publish=b == 2)
    if began_again:
        changes = Changes(buffer.ledger)
    else:
        assert len(list(changes.news())) == 3
    again = learner(buffer, 0, 0, publish=False, branch=0)
    for b in range(3):
        buffer.batch(0.0, again, b)
        buffer.finished(again, b, "applied", Told(0.5, 1.0, 0.0), 3.0)
    assert buffer.published(again, 0, 3, "other") == 1
    assert list(changes.news()) == []
    play(buffer)
    step(buffer, again, 3, 2)
    assert list(changes.news()) == [("bound", 4, 2, "it jumps")]


def test_a_slot_that_plays_an_evaluation_is_not_idle(tmp_path: Path) -> None:
    """Admission has refused the actor, then an evaluation begins and its slots play that."""
    buffer = opened(tmp_path, start=0, eval_sets=(HeldOutSet("held-out", 4, 2, False, 1.0),))
    incarnation = learner(buffer)
    tickets, why = buffer.issue(0.0, "actor-0", (0, 0), 8)
    assert why.startswith("admission")
    for ticket in tickets:
        put(buffer, trajectory(ticket, (0,)))
    buffer.evaluate((0, 0))
    played = buffer.issue(10.0, "actor-0", (0, 0), 8)[0]
    assert {ticket.kind for ticket in played} == {"eval"}
    assert len(played) == 8
    assert buffer.batch(10.0, incarnation, 0).state == "ready"
    buffer.finished(incarnation, 0, "applied", Told(0.25, 0.875, 0.0), 20.0)
    measured = buffer.ledger.history.line[0].measures
    assert measured is not None
    assert measured.idle == 0.25, "4 of 8 slots for 10 of 20 seconds"


def test_a_batch_that_a_branch_takes_over_keeps_a_fixed_bound_that_is_another_one_now(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, max_staleness=2)
    incarnation = learner(buffer)
    play(buffer)
    plain_step(buffer, incarnation, 0)
    buffer = reopen(buffer, tmp_path, max_staleness=1)
    again = learner(buffer, 0, 0, publish=False, branch=0)
    buffer.batch(0.0, again, 0)
    buffer.finished(again, 0, "applied")
    assert buffer.published(again, 0, 1, "other") == 1
    assert [(batch.branch, batch.bound) for batch in buffer.ledger.history.line] == [(1, 2)]


@pytest.mark.parametrize("branch", [False, True])
def test_a_stale_group_counts_on_the_branch_on_which_it_ends(tmp_path: Path, branch: bool) -> None:
    """Group 0 is stored in part with version 0, and becomes stale; with a branch, which begins meanwhile."""
    buffer = opened(tmp_path, start=1)
    incarnation = learner(buffer)
    tickets = buffer.issue(0.0, "actor-0", (0, 0), 8)[0]
    put(buffer, trajectory(tickets[0], (0,)))
    if branch:
        incarnation = learner(buffer, 0, 0, branch=0, fresh=True)
        tickets = buffer.issue(0.0, "actor-0", (1, 0), 8)[0]
    for b in range(4):
        for ticket in tickets:
            if ticket.id.group:
                put(buffer, trajectory(ticket, (b,)))
        step(buffer, incarnation, b, 1)
        tickets = buffer.issue(0.0, "actor-0", (int(branch), b + 1), 8)[0]
    measures = [batch.measures for batch in buffer.ledger.history.line]
    assert [m and m.stale for m in measures] == [0.0, 0.0, 1 / 3, 0.0]
    buffer.commit(0.0)
    ledger = read_ledger(tmp_path)
    assert (ledger.groups[0].reason, ledger.groups[0].branch) == ("stale", 0)
    found = bounds(ledger, [Bounds(2, 1, LIMIT, "drop", 0.5, auto=Auto(0, LIMIT, 1))])
    assert [text for text in found if "share of stale groups" in text] == []
