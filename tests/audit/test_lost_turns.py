"""Recorded turns of which an actor was told that they are stored: in the ledger, or lost with the buffer's host."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.audit.checks import violations
from asyncrl.audit.checks.history import branches_follow
from asyncrl.audit.checks.logs import acknowledgements
from asyncrl.audit.reading import read_ledger
from asyncrl.audit.summary import figures
from asyncrl.audit.witnesses import Evidence
from asyncrl.buffer.ledger.storage.snapshot import restore
from asyncrl.buffer.ledger.witnessed import read_witnessed
from asyncrl.launch.origins import inherit_logs
from asyncrl.trajectory.turns import RecordedSample
from tests.audit.simulated import Simulated
from tests.buffer.fakes import learner
from tests.buffer.tickets.test_turns import answer, episode, played, sample


def lose_host(run: Simulated) -> None:
    """The newest checkpoint's ledger is all that is left of the buffer, and a branch begins on it."""
    run.buffer.commit(run.now)
    run.buffer.database.close()
    for path in run.folder.glob("ledger.sqlite*"):
        path.unlink()
    shutil.rmtree(run.folder / "payloads")
    at = run.lists[-1]
    checkpoint = run.folder / at.checkpoint
    (checkpoint / "state.json").write_text(json.dumps({"branch": at.branch, "batch": at.batch}))
    assert restore(run.folder, run.folder) == checkpoint
    run.buffer = run.open()
    run.incarnation = learner(run.buffer, len(at.done), at.batch, branch=at.branch, publish=False)
    run.publish(len(at.done), "restored")
    run.done[:] = at.done


def lost(folder: Path) -> tuple[Simulated, Evidence]:
    """Of an episode of two turns the checkpoint had the first; the episode then went on in front of the second."""
    run = Simulated(folder, durable=True, max_staleness=3)
    first, second = run.issue(2)
    run.put(second)
    run.record(first, episode(1))
    run.checkpoint()
    run.record(first, [sample(1), answer(1)])
    lose_host(run)
    (again,) = run.issue(1)
    samples = [r for r in again.turns if isinstance(r, RecordedSample)]
    assert len(samples) == 1
    run.record(again, [sample(1, tokens=5)])
    run.put_made(played(again, [*samples, sample(1, tokens=5)]))
    held = read_witnessed(run.folder / run.lists[0].checkpoint)
    evidence = run.evidence()
    ledger = replace(evidence.ledger, in_checkpoints=held.trajectories, turns_in_checkpoints=held.turns)
    return run, replace(evidence, ledger=ledger)


def test_turns_since_the_checkpoint_are_listed_and_outside_of_the_equation(tmp_path: Path) -> None:
    _, evidence = lost(tmp_path)
    assert [str(v) for v in violations(evidence)] == []
    found = figures(evidence)
    assert found.lost_turns == [f"{form} 1 of attempt 0 at trajectory 0.0.0" for form in ("sample", "answer")]
    assert found.turns == {"continued": 4}
    assert found.witnesses["acknowledged_turns"] == 6


@pytest.mark.parametrize("form", ["sample", "answer"])
def test_what_the_checkpoint_holds_cannot_have_been_lost(tmp_path: Path, form: str) -> None:
    _, evidence = lost(tmp_path)
    tables = dict(evidence.ledger.tables)
    tables["turns"] = [row for row in tables["turns"] if (row["attempt"], row["number"], row["form"]) != (0, 0, form)]
    ledger = replace(evidence.ledger, tables=tables)
    said = [text for log in evidence.acks for text in acknowledgements(ledger, log)]
    assert said == [
        f"actor-0 was told that {form} 0 of attempt 0 at trajectory 0.0.0 is stored, and the ledger does not have it"
    ]


def test_without_a_lost_host_each_acknowledged_turn_is_in_the_ledger(tmp_path: Path) -> None:
    run = Simulated(tmp_path, durable=True)
    (ticket,) = run.issue(1)
    run.record(ticket, episode(1))
    run.log.recorded((ticket.id, 0), sample(1))
    run.log.recorded((ticket.id, 7), sample(1))
    evidence = run.evidence()
    said = [text for log in evidence.acks for text in acknowledgements(evidence.ledger, log)]
    assert [text.partition(", and ")[2] for text in said] == [
        "the ledger does not have it",
        "its attempt is not in the ledger",
    ]
    assert figures(evidence).lost_turns == []


def test_the_log_of_a_fork_ends_behind_the_last_turn_that_its_ledger_holds(tmp_path: Path) -> None:
    source = Simulated(tmp_path / "source", durable=True)
    (ticket,) = source.issue(1)
    for each in episode(1):
        source.record(ticket, [each])
    source.buffer.database.write("DELETE FROM logs")
    source.checkpoint()
    before = (source.folder / "acks" / "actor-0.jsonl").read_bytes()
    source.record(ticket, [sample(1)])
    (tmp_path / "acks").mkdir()
    inherit_logs(source.folder / "acks", tmp_path / "acks", read_witnessed(source.folder / source.lists[0].checkpoint))
    assert (tmp_path / "acks" / "actor-0.jsonl").read_bytes() == before
    source.buffer.database.close()
    assert read_ledger(source.folder)


def lost_twice(folder: Path) -> Evidence:
    """Before there was a checkpoint of branch 1: what an actor and the learner wrote of that is of no other branch."""
    run = Simulated(folder, durable=True, max_staleness=3)
    run.rounds(1)
    run.checkpoint()
    for reward in (1.0, 0.25):
        lose_host(run)
        for ticket in run.issue(4):
            run.put(ticket, reward)
        run.step()
    run.checkpoint()
    evidence = run.evidence()
    held = [read_witnessed(folder / each.checkpoint).trajectories for each in run.lists]
    return replace(evidence, ledger=replace(evidence.ledger, in_checkpoints=frozenset().union(*held)))


def test_a_branch_of_which_no_checkpoint_is_left_was_lost_with_the_host(tmp_path: Path) -> None:
    evidence = lost_twice(tmp_path)
    assert [*evidence.ledger.branches] == [0, 2]
    assert {p.branch for p in evidence.published} == {0, 1, 2}
    assert [str(v) for v in violations(evidence)] == []
    assert figures(evidence).lost["host"] == 4
    assert evidence.ledger.restored_at(1) == (-1, -1)
    assert evidence.ledger.restored_at(0) == (1, 1)
    assert evidence.ledger.restored_at(2) is None


def test_a_lost_branch_may_have_begun_before_the_checkpoint(tmp_path: Path) -> None:
    run = Simulated(tmp_path, durable=True, max_staleness=3)
    run.rounds(2)
    run.checkpoint()
    run.fork(1, 1)
    run.rounds(1)
    run.put(run.issue(1)[0])
    lose_host(run)
    run.rounds(1)
    run.checkpoint()
    evidence = run.evidence()
    held = read_witnessed(tmp_path / run.lists[0].checkpoint)
    evidence = replace(evidence, ledger=replace(evidence.ledger, in_checkpoints=held.trajectories))
    assert [(p.branch, p.version) for p in evidence.published][3:] == [(1, 1), (1, 2), (2, 2), (2, 3)]
    assert [str(v) for v in violations(evidence)] == []
    assert figures(evidence).lost["host"] > 0


def test_only_a_restore_skips_numbers_of_branches(tmp_path: Path) -> None:
    ledger = lost_twice(tmp_path).ledger
    fresh = replace(ledger.branches[2], why="a fresh start at batch 1")
    said = [*branches_follow(replace(ledger, branches={0: ledger.branches[0], 2: fresh}), ([], [], []))]
    assert said == [
        "branch 2 begins on branch 0 at batch 1, version 1; expected branch 1 on branch 0, version 1",
    ]
    of_another = replace(ledger.branches[2], parent=1)
    said = [*branches_follow(replace(ledger, branches={0: ledger.branches[0], 2: of_another}), ([], [], []))]
    assert said == [
        "branch 2 begins on branch 1 at batch 1, version 1; expected branch 1 on branch 0, version 1",
    ]
    assert replace(ledger, branches={0: ledger.branches[0], 2: fresh}).restored_at(1) is None
