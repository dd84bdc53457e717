"""The number of a branch is given once in a run, though the ledger that gave it is lost with its host."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from asyncrl.audit.checks.history import branches_follow, starts_follow
from asyncrl.audit.reading import read_ledger
from asyncrl.buffer.core import Buffer
from asyncrl.buffer.ledger.storage.database import LedgerFailed
from asyncrl.buffer.ledger.storage.snapshot import restore
from asyncrl.buffer.rules import Refused
from asyncrl.trajectory import Ticket
from tests.buffer.fakes import open_buffer, put, trajectory
from tests.buffer.tickets.test_branches import advance, fork, opened, violations
from tests.buffer.tickets.test_turns import episode, issue, played, record, sample


def checkpointed(buffer: Buffer, checkpoints: Path, version: int = 1, branch: int = 0) -> Path:
    """A complete checkpoint behind so many batches, all of them applied."""
    path = checkpoints / (f"step-{version}" + (f"-br{branch}" if branch else ""))
    path.mkdir(parents=True)
    current = buffer.ledger.history.current
    assert current is not None
    buffer.checkpointed(0, current.incarnation, version, version, path)
    (path / "state.json").write_text(json.dumps({"version": version, "batch": version, "branch": branch}))
    return path


def begun(run: Path) -> Buffer:
    """One step, its checkpoint, and a ticket of the first group in flight with recorded turns."""
    (run / "checkpoints").mkdir(parents=True)
    buffer = opened(run / "live", checkpoints=run / "checkpoints")
    one, two = issue(buffer, credits=2)
    put(buffer, trajectory(one))
    record(buffer, two, episode(1))
    advance(buffer)
    checkpointed(buffer, run / "checkpoints")
    return buffer


def after_loss(buffer: Buffer, run: Path) -> Buffer:
    """The host is lost; the buffer starts on the newest checkpoint, and no learner yet."""
    buffer.commit(0.0)
    buffer.database.close()
    shutil.rmtree(run / "live")
    assert restore(run / "checkpoints", run / "live") is not None
    return open_buffer(run / "live", max_staleness=3, durable=True, checkpoints=run / "checkpoints")


def of_the_group_in_flight(buffer: Buffer) -> Ticket:
    (ticket,) = [t for t in issue(buffer, credits=9) if (t.id.group, t.id.index) == (0, 1)]
    return ticket


def test_tickets_of_a_lost_branch_are_none_of_the_branch_that_follows(tmp_path: Path) -> None:
    buffer = begun(tmp_path)
    fork(buffer, 1)  # of this branch there is no checkpoint
    lost = of_the_group_in_flight(buffer)
    buffer = after_loss(buffer, tmp_path)
    fork(buffer, 1)
    again = of_the_group_in_flight(buffer)
    assert (str(lost.id), lost.attempt) == ("1.0.1", 1)
    assert (str(again.id), again.attempt, again.min_version) == ("2.0.1", 1, (2, 1))
    assert record(buffer, lost, [sample(1, 1)]) == ["revoked"]
    assert put(buffer, played(lost, [sample(1, 1)])) == "late"
    assert [*buffer.status()["equation"]] == ["0", "2"]
    assert violations(buffer, tmp_path / "live") == []
    ledger = read_ledger(tmp_path / "live")
    assert [*branches_follow(ledger, ([], [], [])), *starts_follow(ledger, ([], [], []))] == []


def test_a_host_that_is_lost_twice_behind_one_checkpoint(tmp_path: Path) -> None:
    buffer = begun(tmp_path)
    for branch in (1, 2):
        buffer = after_loss(buffer, tmp_path)
        fork(buffer, 1)
        assert buffer.ledger.history.branch == branch
    buffer = after_loss(after_loss(buffer, tmp_path), tmp_path)  # no learner started in between
    fork(buffer, 1)
    assert list(buffer.ledger.history.branches) == [0, 3]
    fork(buffer, 1)
    assert list(buffer.ledger.history.branches) == [0, 3, 4], "on a ledger that is there, they follow on each other"
    buffer.database.close()


def test_a_checkpoint_that_is_passed_over_names_its_branch_too(tmp_path: Path) -> None:
    """Such as of a run folder without the file of numbers; it is no point of the history that follows."""
    buffer = begun(tmp_path)
    fork(buffer, 0)
    advance(buffer)
    passed_over = checkpointed(buffer, tmp_path / "checkpoints", 1, branch=1)
    (passed_over / "buffer" / "ledger.sqlite").write_bytes(b"damaged")
    (tmp_path / "checkpoints" / "branch").unlink()
    buffer = after_loss(buffer, tmp_path)
    fork(buffer, 1)
    assert list(buffer.ledger.history.branches) == [0, 2]
    with pytest.raises(Refused) as refused:
        buffer.start(1, 1, 1)
    assert refused.value.code == "unknown_checkpoint"
    assert buffer.start(1, 1, 0).branch == 2
    buffer.database.close()


def test_the_number_is_on_the_disk_before_the_branch_is(tmp_path: Path) -> None:
    buffer = begun(tmp_path)
    file = tmp_path / "checkpoints" / "branch"
    assert file.read_text() == "0\n"
    fork(buffer, 1)
    assert file.read_text() == "1\n"
    buffer.database.close()  # as a crash before the commit would
    buffer = open_buffer(tmp_path / "live", max_staleness=3, durable=True, checkpoints=tmp_path / "checkpoints")
    assert list(buffer.ledger.history.branches) == [0]
    fork(buffer, 1)
    assert (list(buffer.ledger.history.branches), file.read_text()) == ([0, 1], "1\n")
    buffer.commit(0.0)
    buffer.database.close()
    file.unlink()  # the ledger of an earlier state of the code
    open_buffer(tmp_path / "live", durable=True, checkpoints=tmp_path / "checkpoints").database.close()
    assert file.read_text() == "1\n"


def test_a_number_that_cannot_be_noted_or_read_begins_no_branch(tmp_path: Path) -> None:
    buffer = begun(tmp_path)
    unfinished = tmp_path / "checkpoints" / ".branch"
    unfinished.mkdir()
    with pytest.raises(LedgerFailed, match=r"checkpoints/branch cannot be written.*Branch 1 cannot begin"):
        fork(buffer, 1)
    unfinished.rmdir()
    (tmp_path / "checkpoints" / "branch").write_text("one")
    with pytest.raises(LedgerFailed, match=r"checkpoints/branch cannot be read.*'one.*events\.jsonl"):
        after_loss(buffer, tmp_path)
    assert not (tmp_path / "live").exists()


def test_a_host_that_is_lost_before_the_first_checkpoint(tmp_path: Path) -> None:
    """There is nothing to restore: the run begins anew, on a branch of its own."""
    (tmp_path / "checkpoints").mkdir()
    buffer = opened(tmp_path / "live", checkpoints=tmp_path / "checkpoints")
    lost, _ = issue(buffer, credits=2)
    for branch in (1, 2):
        buffer.commit(0.0)
        buffer.database.close()
        shutil.rmtree(tmp_path / "live")
        assert restore(tmp_path / "checkpoints", tmp_path / "live") is None
        buffer = open_buffer(tmp_path / "live", max_staleness=3, durable=True, checkpoints=tmp_path / "checkpoints")
        assert put(buffer, trajectory(lost)) == "late", "no learner has started"
        assert issue(buffer, credits=2) == []
        buffer.commit(0.0)
        assert read_ledger(tmp_path / "live").restored_at(0) == (0, 0)
        started = buffer.start(0, 0, None)
        buffer.published(started.incarnation, started.branch, 0, f"digest-{branch}")
        assert list(buffer.ledger.history.branches) == [0, branch]
        again, _ = issue(buffer, credits=2)
        assert (lost.id.group, lost.id.index, lost.attempt) == (again.id.group, again.id.index, again.attempt)
        assert again.id.branch == branch
        assert record(buffer, lost, episode(1)[:1]) == ["revoked"]
        assert put(buffer, trajectory(lost)) == "late"
        assert put(buffer, trajectory(again)) == "stored"
        assert violations(buffer, tmp_path / "live") == []
        ledger = read_ledger(tmp_path / "live")
        assert [*branches_follow(ledger, ([], [], [])), *starts_follow(ledger, ([], [], []))] == []
        assert ledger.restored_at(0) == (0, 0)
        lost = again
