"""Recorded turns of which an actor was told that they are stored: in the ledger, or lost with the buffer's host."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.audit.checks import violations
from asyncrl.audit.checks.logs import acknowledgements
from asyncrl.audit.reading import read_ledger
from asyncrl.audit.summary import figures
from asyncrl.audit.witnesses import Evidence
from asyncrl.buffer.ledger.storage.database import Database
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
    checkpoint = run.folder / run.lists[-1].checkpoint
    shutil.copytree(checkpoint / "buffer", run.folder, dirs_exist_ok=True)
    database = Database(run.folder)
    database.set("restored", checkpoint.name)
    database.commit(0.0)
    database.close()
    run.buffer = run.open()
    at = run.lists[-1]
    run.incarnation = learner(run.buffer, len(at.done), at.batch, branch=at.branch, publish=False)
    run.publish(len(at.done), "restored")
    del run.done[at.batch :]


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
