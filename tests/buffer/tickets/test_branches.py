"""Groups in flight go on when a branch begins, with what the branch could have produced; earlier attempts are void."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from asyncrl.audit.checks.drops import discarded_groups_were_left_behind
from asyncrl.audit.checks.history import attempts_end_once, attempts_were_lent_with_published_weights
from asyncrl.audit.reading import read_ledger
from asyncrl.buffer.core import Buffer
from asyncrl.buffer.rules import Refused
from asyncrl.trajectory.turns import RecordedSample
from tests.buffer.fakes import equation, learner, open_buffer, put, step, trajectory
from tests.buffer.tickets.test_lengths import cut
from tests.buffer.tickets.test_turns import RESET, answer, counts, episode, issue, played, record, sample
from tests.buffer.tickets.test_turns import violations as of_turns


def opened(tmp_path: Path, **changes: Any) -> Buffer:
    buffer = open_buffer(tmp_path, max_staleness=3, durable=True, **changes)
    learner(buffer)
    return buffer


def advance(buffer: Buffer, steps: int = 1) -> None:
    """So many training steps, on groups of another actor."""
    history = buffer.ledger.history
    assert history.current is not None
    for _ in range(steps):
        for ticket in issue(buffer, "player", 4):
            put(buffer, trajectory(ticket, (history.version,)))
        step(buffer, history.current.incarnation, len(history.line))


def fork(buffer: Buffer, at: int) -> None:
    """A branch begins at this version and batch, and its weights are published."""
    started = buffer.start(at, at, 0, fresh=True)
    buffer.published(started.incarnation, started.branch, at, f"other-{at}")


def violations(buffer: Buffer, folder: Path) -> list[str]:
    found = of_turns(buffer, folder)
    ledger = read_ledger(folder)
    found += discarded_groups_were_left_behind(ledger, ())
    for check in (attempts_end_once, attempts_were_lent_with_published_weights):
        found += check(ledger, ([], [], []))
    return found


def test_a_group_in_flight_goes_on_with_its_stored_trajectories_and_its_turns(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    one, two = issue(buffer, credits=2)
    put(buffer, trajectory(one))
    record(buffer, two, [*episode(1), sample(1)])
    advance(buffer)
    fork(buffer, 1)
    assert equation(buffer, 0) == {"issued": 3, "in_flight": 1, "trained": 2}
    (again,) = issue(buffer, "actor-1")
    assert (str(again.id), again.attempt, again.min_version) == ("1.0.1", 1, (1, 1))
    assert [r.named for r in again.turns] == ["answer -1", "intent 0", "answer 0", "intent 1"]
    assert record(buffer, again, [answer(1), sample(2, 1)], "actor-1") == ["stored"] * 2
    samples = [r for r in again.turns if isinstance(r, RecordedSample)]
    assert put(buffer, played(again, [*samples, sample(2, 1)])) == "stored"
    assert counts(buffer) == {"continued": 6}
    assert equation(buffer, 0)["waiting"] == 1
    assert violations(buffer, tmp_path) == []


def test_a_turn_later_than_the_branch_goes_with_all_after_it(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    advance(buffer)
    ticket, _ = issue(buffer, credits=2)
    record(buffer, ticket, episode(1, version=1))
    advance(buffer)
    record(buffer, ticket, [sample(1, 2), answer(1), sample(2, 2)])
    fork(buffer, 1)
    assert counts(buffer) == {"kept": 3, "discarded_branch": 3}
    assert buffer.tickets.carried.turns.wasted == 6
    assert violations(buffer, tmp_path) == []
    (again,) = [t for t in issue(buffer, credits=9) if t.id.group == ticket.id.group and not t.id.index]
    assert [r.named for r in again.turns] == ["answer -1", "intent 0", "answer 0"]
    assert record(buffer, again, [sample(1, 1), answer(1)]) == ["stored"] * 2
    assert violations(buffer, tmp_path) == []


def test_a_group_with_a_later_trajectory_is_dropped_with_its_turns(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    advance(buffer, 2)
    one, two = issue(buffer, credits=2)
    put(buffer, trajectory(one, (2,)))
    record(buffer, two, [RESET, sample(0, 2)])
    fork(buffer, 1)
    assert equation(buffer, 0)["dropped: discarded_branch"] == 1
    assert counts(buffer) == {"dropped": 2}
    assert violations(buffer, tmp_path) == []


def test_turns_of_a_trajectory_that_the_disk_lost_went_on_nowhere(tmp_path: Path) -> None:
    """It had continued them; what comes in its place on a later branch did not."""
    buffer = opened(tmp_path)
    advance(buffer)
    _, two = issue(buffer, credits=2)
    record(buffer, two, [RESET, sample(0, 1)])
    assert put(buffer, played(two, [sample(0, 1)])) == "stored"
    buffer.commit(0.0)
    buffer.database.close()
    cut(tmp_path)
    buffer = open_buffer(tmp_path, max_staleness=3, durable=True)
    assert buffer.lost_to_disk == 1
    fork(buffer, 0)
    (again,) = [t for t in issue(buffer, credits=9) if (t.id.group, t.id.index) == (two.id.group, two.id.index)]
    record(buffer, again, [RESET, sample(0, 0)])
    assert put(buffer, played(again, [sample(0, 0)])) == "stored"
    assert violations(buffer, tmp_path) == []


def test_attempts_lent_before_the_branch_are_void(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    one, two = issue(buffer, credits=2)
    stored = trajectory(one)
    put(buffer, stored)
    record(buffer, two, episode(1))
    advance(buffer)
    fork(buffer, 1)
    (again,) = [t for t in issue(buffer, credits=9) if t.id.index == 1 and t.id.group == 0]
    assert put(buffer, stored) == "duplicate"
    assert record(buffer, two, [sample(1)]) == ["revoked"]
    assert buffer.renew(0.0, "actor-0", [(two.id, 0), (again.id, 1)]) == [(two.id, 0)]
    assert put(buffer, played(two, [sample(0)])) == "late"
    buffer.fail("actor-0", two.id, 0, "env_error", "away")
    buffer.release("actor-0", [(two.id, 0)])
    assert [lease.attempt for lease in buffer.leases if lease.id == again.id] == [1]
    with pytest.raises(Refused, match=r"attempt 7 at ticket 1\.0\.1 was never issued"):
        put(buffer, trajectory(again.id, attempt=7))
    assert put(buffer, played(again, [sample(0)])) == "stored"
    assert violations(buffer, tmp_path) == []
    ledger = read_ledger(tmp_path)
    assert [(a.branch, a.ended) for a in ledger.attempts[0, 1]] == [(0, "late"), (1, "stored")]
    assert [row.branch for row in ledger.members[0]] == [0, 1]


def test_the_same_number_on_a_host_that_was_lost_names_another_attempt(tmp_path: Path) -> None:
    """Its ledger was behind: attempt 1 was lent there too, to the same actor."""
    buffer = opened(tmp_path / "lost")
    one, two = issue(buffer, credits=2)
    put(buffer, trajectory(one))
    record(buffer, two, episode(1))
    advance(buffer)
    buffer.commit(0.0)
    shutil.copytree(tmp_path / "lost", tmp_path / "found")
    buffer.release("actor-0", [(two.id, 0)])
    (lost,) = issue(buffer)
    assert (str(lost.id), lost.attempt) == ("0.0.1", 1)
    buffer.database.close()
    buffer = open_buffer(tmp_path / "found", max_staleness=3, durable=True)
    fork(buffer, 1)
    (again,) = issue(buffer)
    assert (str(again.id), again.attempt) == ("1.0.1", 1)
    assert record(buffer, lost, [sample(1, 1)]) == ["revoked"]
    assert put(buffer, played(lost, [sample(0), sample(1, 1)])) == "late"
    assert put(buffer, played(again, [sample(0)])) == "stored"
    assert violations(buffer, tmp_path / "found") == []


def test_filters_drop_as_many_groups_on_a_new_branch_as_on_any(tmp_path: Path) -> None:
    """Also those that were issued on the branch before."""

    def alike(group: Any) -> bool:
        return len(set(group.rewards)) == 1

    buffer = opened(tmp_path, filters=(alike,), filter_max_ratio=0.5)
    open_groups = [issue(buffer, credits=2) for _ in range(3)]
    fork(buffer, 0)
    for _ in open_groups:
        for ticket in issue(buffer, credits=2):
            put(buffer, trajectory(ticket, (0,)))
    counted = equation(buffer, 0)
    assert (counted["dropped: filtered"], counted["waiting"]) == (1, 2)
