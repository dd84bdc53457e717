"""When a result of an evaluation ends the run, what a redo and a branch make of it, and which weights are the best."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from asyncrl.audit.checks import violations
from asyncrl.buffer.core import Buffer
from asyncrl.config.choosing import Choosing
from asyncrl.config.held_out import HeldOutSet
from tests.audit.histories.evaluations import stopped
from tests.audit.simulated import Simulated
from tests.buffer.fakes import learner, open_buffer, put, reopen, step, trajectory

DEV = ("dev", "sampled")
SETS = (HeldOutSet("dev", 4, 1, False, 1.0),)


class Run:
    """Every step is evaluated by `actor-0`, with the given shares of 4 tasks solved."""

    def __init__(self, folder: Path, **choosing: Any) -> None:
        self.rules: dict[str, Any] = {
            "eval_sets": SETS, "eval_every": 1, "eval_reserved": 1, "choosing": Choosing(**choosing),
        }  # fmt: skip
        self.folder = folder
        self.buffer: Buffer = open_buffer(folder, **self.rules)
        self.incarnation = learner(self.buffer)

    def train(self, b: int) -> None:
        history = self.buffer.ledger.history
        for ticket in self.buffer.issue(0, "actor-1", (history.branch, history.published or 0), 99)[0]:
            put(self.buffer, trajectory(ticket, (history.published or 0,)))
        step(self.buffer, self.incarnation, b)

    def evaluate(self, solved: int) -> None:
        pinned = self.buffer.evals.pinned
        assert pinned is not None
        for place, ticket in enumerate(self.buffer.issue(0, "actor-0", pinned, 99)[0]):
            assert put(self.buffer, trajectory(ticket, (pinned[1],), float(place < solved))) == "stored"

    def asks(self, b: int) -> tuple[str, str]:
        answer = self.buffer.batch(0, self.incarnation, b)
        return answer.state, answer.why

    def kill(self) -> None:
        self.buffer = reopen(self.buffer, self.folder, **self.rules)


REACHED = "set dev reached 75.0% sampled success at version 2, eval.stop_at is 0.75"


def test_a_recorded_result_ends_the_run_at_the_next_step_and_a_redo_ends_there_too(tmp_path: Path) -> None:
    run = Run(tmp_path, stop_at=((DEV, 0.75),))
    run.train(0)
    run.evaluate(2)
    run.train(1)
    run.train(2)  # the evaluation of version 2 is open meanwhile
    run.evaluate(3)
    assert run.asks(3) == ("ended", REACHED)
    assert [tuple(row) for row in run.buffer.database.read("SELECT batch, version, eval FROM stops")] == [(3, 3, 2)]
    run.kill()
    run.incarnation = learner(run.buffer, 1, 1, branch=0, publish=False)
    for b in (1, 2):
        step(run.buffer, run.incarnation, b)
    assert run.asks(3) == ("ended", REACHED)
    assert run.buffer.batch(0, run.incarnation, 3).failed is False


def test_a_kill_between_the_result_and_the_stop_changes_nothing(tmp_path: Path) -> None:
    """The buffer dies during the evaluation, and behind its last result, before anybody asks for a batch."""
    run = Run(tmp_path, stop_at=((DEV, 0.75),))
    run.train(0)
    run.evaluate(0)
    run.train(1)
    tickets = run.buffer.issue(0, "actor-0", (0, 2), 2)[0]
    for ticket in tickets:
        put(run.buffer, trajectory(ticket, (2,), 1.0))
    run.kill()
    for place, ticket in enumerate(run.buffer.issue(0, "actor-0", (0, 2), 99)[0]):
        put(run.buffer, trajectory(ticket, (2,), float(place < 1)))
    run.kill()
    run.incarnation = learner(run.buffer, 2, 2, branch=0, publish=False)
    assert run.asks(2) == ("ended", REACHED)
    run.buffer.database.write("DELETE FROM stops")  # as if it had died before the commit of the answer
    run.kill()
    run.incarnation = learner(run.buffer, 2, 2, branch=0, publish=False)
    assert run.asks(2) == ("ended", REACHED)


@pytest.mark.parametrize("fork", [1, 2])
def test_a_branch_from_before_the_stop_voids_it_and_its_result_acts_no_more(tmp_path: Path, fork: int) -> None:
    run = Run(tmp_path, stop_at=((DEV, 0.75),))
    for b, solved in enumerate((0, 3)):
        run.train(b)
        run.evaluate(solved)
        if b == 0:
            assert run.asks(1)[0] != "ended"
    assert run.asks(2) == ("ended", REACHED)
    run.incarnation = learner(run.buffer, fork, fork, branch=0, publish=False, fresh=True)
    assert [tuple(row) for row in run.buffer.database.read("SELECT released FROM stops")] == [(1,)]
    run.buffer.published(run.incarnation, 1, fork, "again")
    run.evaluate(4)
    assert run.asks(fork)[0] == "ended", "a result of the new branch acts"
    assert "100.0%" in run.asks(fork)[1]


@pytest.mark.parametrize(("start", "ends"), [(1, True), (0, False)])
def test_a_redo_with_other_weights_ends_where_the_stop_was_unless_it_began_before_the_result(
    tmp_path: Path, start: int, ends: bool
) -> None:
    """As on a GPU: nobody asked for the branch."""
    run = Run(tmp_path, stop_at=((DEV, 0.75),))
    for b, solved in enumerate((0, 3)):
        run.train(b)
        if solved:
            run.train(2)  # the evaluation of version 2 is open meanwhile
        run.evaluate(solved)
    assert run.asks(3) == ("ended", REACHED)
    run.kill()
    run.incarnation = learner(run.buffer, start, start, branch=0, publish=False)
    if ends:
        step(run.buffer, run.incarnation, 1)
    redone = 2 if ends else 0
    assert run.asks(redone)[0] == "ready"
    run.buffer.finished(run.incarnation, redone, "applied")
    assert run.buffer.published(run.incarnation, 0, redone + 1, "another") == 1
    assert [row[0] for row in run.buffer.database.read("SELECT released FROM stops")] == [not ends]
    if ends:
        assert run.asks(3) == ("ended", REACHED)
        run.kill()
        run.incarnation = learner(run.buffer, 2, 2, branch=0, publish=False)
        step(run.buffer, run.incarnation, 2)
        assert run.asks(3) == ("ended", REACHED)


def test_patience_counts_evaluations_without_a_better_success(tmp_path: Path) -> None:
    run = Run(tmp_path, patience=((DEV, 2),))
    for b, solved in enumerate((2, 3, 3)):
        run.train(b)
        run.evaluate(solved)
    assert run.asks(3)[0] != "ended", "one evaluation without a better one"
    run.train(3)
    run.evaluate(1)
    why = "set dev has not exceeded the 75.0% sampled success of version 2 in 2 evaluations (eval.patience)"
    assert run.asks(4) == ("ended", why)


def test_the_best_weights_are_those_of_the_first_highest_success_on_the_line(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_best=DEV)
    seen = []
    for b, solved in enumerate((2, 3, 3, 1)):
        run.train(b)
        assert list(run.buffer.evaluation().undecided) == [(0, b + 1)]
        run.evaluate(solved)
        seen.append(run.buffer.evaluation().results[0])
        assert not run.buffer.evaluation().undecided
    assert seen == [(0, 1, 0.5), (0, 2, 0.75), (0, 2, 0.75), (0, 2, 0.75)]
    run.incarnation = learner(run.buffer, 1, 1, branch=0, publish=False, fresh=True)
    assert run.buffer.evaluation().results[0] == (0, 1, 0.5), "version 2 is of a branch that was left"


def test_a_result_of_other_weights_than_those_that_were_due_cannot_be_the_best(tmp_path: Path) -> None:
    """Their export was not written."""
    run = Run(tmp_path, keep_best=DEV)
    for b in (0, 1):
        run.train(b)
    run.buffer.evaluation(lost=(0, 1))
    assert not run.buffer.evaluation().undecided
    run.evaluate(4)
    assert run.buffer.evaluation().results == []


def test_the_audit_bears_stops_and_misses_none(tmp_path: Path) -> None:
    made = stopped(tmp_path / "whole")
    evidence = made.evidence()
    assert list(violations(evidence)) == []
    assert [(row["batch"], row["released"]) for row in evidence.ledger.tables["stops"]] == [(2, 1), (3, 0)]
    evals = evidence.ledger.tables["evals"]
    evals.append(next(row for row in evals if row["state"] == "skipped") | {"serial": len(evals) + 1})
    assert [v.what for v in violations(evidence) if v.check == "evaluations"] == [
        "set dev is skipped 2 times at version 3 of branch 1"
    ]
    evals.pop()
    evidence.ledger.tables["stops"].clear()
    assert "the run was to stop before it: set dev reached" in "".join(map(str, violations(evidence)))


def redone(folder: Path) -> Simulated:
    """A result stopped the run behind a step that was redone with other weights."""
    run = Simulated(folder, eval_sets=SETS, eval_every=1, eval_reserved=1, choosing=Choosing(stop_at=((DEV, 0.75),)))
    run.trained(1)
    run.evaluated(1, success=(0.0,) * 4)
    run.trained(1)
    run.trained(1)
    run.evaluated(2, success=(1.0,) * 4)
    assert run.buffer.batch(run.now, run.incarnation, 3).state == "ended"
    run.incarnation = learner(run.buffer, 2, 2, branch=0, publish=False)
    assert run.buffer.batch(run.now, run.incarnation, 2).state == "ready"
    run.buffer.finished(run.incarnation, 2, "applied")
    assert run.buffer.published(run.incarnation, 0, 3, "another") == 1
    run.publish(3, "another")
    return run


def test_the_audit_bears_a_stop_that_a_redo_keeps(tmp_path: Path) -> None:
    run = redone(tmp_path)
    assert run.buffer.batch(run.now, run.incarnation, 3).state == "ended"
    evidence = run.evidence()
    assert list(violations(evidence)) == []
    evidence.ledger.tables["stops"][0]["released"] = 1
    assert "voided" in "".join(map(str, violations(evidence)))


def test_the_audit_misses_no_stop_where_only_keep_best_was_changed(tmp_path: Path) -> None:
    evidence = stopped(tmp_path).evidence()
    evidence.ledger.tables["stops"].clear()
    (bounds,) = evidence.rules
    kept = dataclasses.replace(bounds, choosing=dataclasses.replace(bounds.choosing, keep_best=DEV))
    found = violations(dataclasses.replace(evidence, rules=(bounds, kept)))
    assert "the run was to stop before it: set dev reached" in "".join(map(str, found))
