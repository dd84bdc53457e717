"""Checkpoints, what they hold and release; the bound on the disk; a run that lost its ledger."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer.core import Buffer
from asyncrl.buffer.ledger import checkpoints
from asyncrl.buffer.ledger.storage.snapshot import restore
from asyncrl.buffer.retention import ALMOST_FULL
from asyncrl.buffer.rules import Refused
from tests.buffer.fakes import equation, learner, open_buffer, play, put, reopen, step, trajectory


def test_checkpoints_release_payloads_and_carry_the_ledger(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path / "buffer")
    incarnation = learner(buffer)
    payloads = buffer.database.payloads
    for b in range(4):
        play(buffer)
        step(buffer, incarnation, b)
        target = tmp_path / f"checkpoint-{b}"
        target.mkdir()
        buffer.checkpointed(0, incarnation, b + 1, b + 1, target)
        buffer.checkpointed(0, incarnation, b + 1, b + 1, target)
    with pytest.raises(Refused, match="the live ledger"):
        buffer.checkpointed(0, incarnation, 4, 4, tmp_path)
    assert len(payloads.segments) < 5
    again = learner(buffer, version=3, batch=3, branch=0)
    assert len(buffer.share(buffer.batch(0, again, 3), 0, 1)) == 4  # still needed
    buffer.database.close()
    restored = open_buffer(tmp_path / "checkpoint-3" / "buffer")
    assert restored.lost_to_disk == 0
    assert restored.ledger.history.version == 4
    started = restored.start(4, 4, 0, fresh=True)
    assert started.branch == 1
    restored.published(started.incarnation, 1, 4, "d")
    play(restored)
    assert restored.batch(0, started.incarnation, 4).state == "ready"
    restored.database.close()


def test_a_run_without_its_ledger_goes_on_from_a_checkpoint_as_a_new_branch(tmp_path: Path) -> None:
    live, checkpoints = tmp_path / "live", tmp_path / "checkpoints"
    buffer = open_buffer(live)
    incarnation = learner(buffer)
    late = []
    for b in range(4):
        late = play(buffer)
        step(buffer, incarnation, b)
        folder = checkpoints / f"step-{b + 1}"
        folder.mkdir(parents=True)
        buffer.checkpointed(0, incarnation, b + 1, b + 1, folder)
        (folder / "state.json").write_text(json.dumps({"version": b + 1, "batch": b + 1, "branch": 0}))
    gone = play(buffer)
    assert restore(checkpoints, live) is None
    buffer.database.close()
    shutil.rmtree(live)
    assert restore(checkpoints, live) == checkpoints / "step-4"
    again = open_buffer(live)
    assert again.lost_to_disk == 0
    # A learner that trained on what is lost must restart; until then nothing is issued, and nothing has failed.
    with pytest.raises(Refused, match="the learner must restart"):
        again.batch(0, incarnation, 4)
    assert again.issue(0, "a", (0, 4), 4)[0] == []
    assert put(again, trajectory(gone[0], (4,))) == "late"
    started = again.start(4, 4, 0)
    assert (started.branch, started.published) == (1, -1)
    again.published(started.incarnation, 1, 4, "d")
    assert put(again, trajectory(gone[0], (4,))) == "late"
    assert put(again, trajectory(late[0], (3,), float(late[0].id.index))) in ("duplicate", "late")
    play(again)
    step(again, started.incarnation, 4)
    assert again.start(4, 4, 0).branch == 1  # restored once, forked once
    again.database.close()
    assert restore(tmp_path / "nothing", tmp_path / "other") is None


def slow_links(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Checkpoints are written no further than their segments, until the event is set."""
    go, link = threading.Event(), os.link

    def slow(*args: Any) -> None:
        assert go.wait(20)
        link(*args)

    monkeypatch.setattr(os, "link", slow)
    return go


def test_a_checkpoint_is_written_beside_the_buffers_work_and_holds_its_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = open_buffer(tmp_path / "buffer")
    incarnation = learner(buffer)
    play(buffer)
    step(buffer, incarnation, 0)
    target = tmp_path / "checkpoint"
    target.mkdir()
    go = slow_links(monkeypatch)
    arguments = (0, incarnation, 1, 1, target)
    assert not buffer.checkpointed(*arguments, wait=False)
    assert not buffer.checkpointed(*arguments, wait=False)  # the request sent again
    assert play(buffer)  # meanwhile actors put and the ledger commits
    step(buffer, incarnation, 1)
    buffer.commit(0)
    go.set()
    assert buffer.checkpointed(*arguments)
    restored = open_buffer(target / "buffer")
    assert restored.lost_to_disk == 0
    assert (restored.ledger.history.version, buffer.ledger.history.version) == (1, 2)
    restored.database.close()
    play(buffer)
    step(buffer, incarnation, 2)


def skip(buffer: Buffer, incarnation: int, b: int) -> int:
    """Batch b is refused by the learner's guard; gives a group of it."""
    play(buffer)
    answer = buffer.batch(0, incarnation, b)
    assert answer.batch is not None
    buffer.finished(incarnation, b, "guard")
    return answer.batch.groups[0]


def checkpoint(buffer: Buffer, incarnation: int, folder: Path) -> None:
    """After the last batch."""
    history = buffer.ledger.history
    path = folder / f"checkpoint-{len(history.line)}"
    path.mkdir()
    buffer.checkpointed(0, incarnation, history.version, len(history.line), path)


def test_payloads_of_skipped_batches_go_oldest_first_and_no_more_than_the_disk_needs(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path / "buffer", max_skipped=9, keep_checkpoints=2)
    incarnation = learner(buffer)
    skipped = []
    for b in range(4):
        skipped.append(skip(buffer, incarnation, b))
        checkpoint(buffer, incarnation, tmp_path)  # a segment ends with each
    assert all(buffer.ledger.has_payload(number) for number in skipped)
    assert not buffer.checkpoint_wanted
    payloads = buffer.database.payloads
    oldest = payloads.size(min(payloads.segments))
    # Almost full, and below that again as soon as the oldest segment is gone: it holds batches 0 and 1.
    buffer = reopen(
        buffer, tmp_path / "buffer", max_skipped=9, max_disk_bytes=(payloads.disk_bytes - oldest / 2) / ALMOST_FULL
    )
    assert buffer.checkpoint_wanted
    incarnation = learner(buffer, 0, 4, branch=0, publish=False)
    buffer.checkpointed(0, incarnation, 0, 4, tmp_path / "checkpoint-4")
    assert [buffer.ledger.has_payload(number) for number in skipped] == [False, False, True, True]
    assert not buffer.checkpoint_wanted


def test_almost_full_all_but_one_of_the_older_checkpoints_are_released(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path / "buffer", keep_checkpoints=4)
    incarnation = learner(buffer)

    def kept() -> list[int]:
        return [r[0] for r in buffer.database.read("SELECT batch FROM checkpoints WHERE released = 0 ORDER BY batch")]

    for b in range(5):
        play(buffer)
        step(buffer, incarnation, b)
        checkpoint(buffer, incarnation, tmp_path)
    assert kept() == [2, 3, 4, 5]
    used = buffer.database.payloads.disk_bytes
    buffer = reopen(buffer, tmp_path / "buffer", keep_checkpoints=4, max_disk_bytes=used / 0.9)
    incarnation = learner(buffer, 5, 5, branch=0)
    play(buffer)
    answer = buffer.batch(0, incarnation, 5)
    assert answer.state == "ready"
    assert buffer.checkpoint_wanted  # the learner is told with every batch, and checkpoints after the step
    buffer.finished(incarnation, 5, "applied")
    checkpoint(buffer, incarnation, tmp_path)
    assert kept() == [5, 6]
    buffer.commit(0)
    assert buffer.database.payloads.disk_bytes < used


def test_a_full_disk_issues_no_group_trains_what_is_there_and_ends_with_the_size_needed(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path)
    incarnation = learner(buffer)
    tickets = play(buffer, credits=2)
    begun = buffer.issue(0, "a", (0, 0), 1)[0]
    buffer.commit(0)
    used = buffer.database.payloads.disk_bytes
    buffer = reopen(buffer, tmp_path, max_disk_bytes=used)
    incarnation = learner(buffer, publish=False)
    left, why = buffer.issue(0, "a", (0, 0), 9)
    assert (
        {t.id.group for t in left} == {begun[0].id.group} != {tickets[0].id.group}
    )  # a group that is in flight goes on
    assert why.startswith("disk: the payloads reach buffer.max_disk_gb")
    for ticket in (*begun, *left):
        assert put(buffer, trajectory(ticket)) == "stored"
    assert step(buffer, incarnation, 0) == (0, 1)
    buffer.commit(0)
    ended = buffer.batch(0, incarnation, 1)
    assert (ended.state, ended.failed) == ("ended", True)
    assert "raise buffer.max_disk_gb above" in ended.why


def test_a_request_that_is_answered_already_leaves_the_checkpoint_as_it_is(tmp_path: Path) -> None:
    """The learner hashes and renames the folder from the first answer on."""
    buffer = open_buffer(tmp_path / "buffer")
    incarnation = learner(buffer)
    target = tmp_path / "checkpoint"
    target.mkdir()
    assert buffer.checkpointed(0, incarnation, 0, 0, target)
    shutil.rmtree(target / "buffer")
    assert buffer.checkpointed(0, incarnation, 0, 0, target, wait=False)
    assert list(target.iterdir()) == []
    target.rmdir()  # renamed
    assert buffer.checkpointed(0, incarnation, 0, 0, target, wait=False)


def test_the_first_checkpoint_may_never_be_complete_and_the_initial_weights_be_gone_back_to(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path / "buffer")
    incarnation = learner(buffer)
    play(buffer, credits=4)
    used = step(buffer, incarnation, 0)
    target = tmp_path / "checkpoint"
    target.mkdir()
    buffer.checkpointed(0, incarnation, 1, 1, target)
    buffer.commit(0)
    shutil.rmtree(target)
    answer = buffer.batch(0, learner(buffer), 0)
    assert answer.batch is not None
    assert answer.batch.groups == used
    assert len(buffer.share(answer, 0, 1)) == 2 * len(used)


def test_a_folder_that_a_new_learner_removes_is_the_old_ones_loss_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = open_buffer(tmp_path / "buffer")
    incarnation = learner(buffer)
    play(buffer)
    step(buffer, incarnation, 0)
    target = tmp_path / "checkpoint"
    target.mkdir()
    go = slow_links(monkeypatch)
    assert not buffer.checkpointed(0, incarnation, 1, 1, target, wait=False)
    target.rename(tmp_path / "doomed")
    shutil.rmtree(tmp_path / "doomed")
    go.set()
    with pytest.raises(Refused, match="is not a folder"):
        buffer.checkpointed(0, incarnation, 1, 1, target)
    again = learner(buffer)
    step(buffer, again, 0)


def test_checkpoints_that_no_learner_resumed_from_take_no_place(tmp_path: Path) -> None:
    """A learner that died while its folder was unfinished goes on from the one before, and that one must stay."""
    buffer = open_buffer(tmp_path / "buffer")
    incarnation = learner(buffer)
    for b in range(4):
        play(buffer)
        step(buffer, incarnation, b)
        if b in (0, 1, 3):
            checkpoint(buffer, incarnation, tmp_path)
    again = learner(buffer, version=2, batch=2, branch=0)
    step(buffer, again, 2)
    path = tmp_path / "checkpoint-3"
    path.mkdir()
    buffer.checkpointed(0, again, 3, 3, path)
    assert checkpoints.oldest(buffer.ledger.db) == 2


def test_a_group_that_was_trained_on_and_lost_by_the_disk_ends_as_trained(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_uses": 2, "groups_per_step": 1}
    buffer = open_buffer(tmp_path, **options)
    incarnation = learner(buffer)
    play(buffer, credits=2)
    step(buffer, incarnation, 0)
    assert equation(buffer) == {"issued": 1, "waiting": 1}
    buffer.commit(0)
    buffer.database.close()
    for segment in (tmp_path / "payloads").glob("*.segment"):
        os.truncate(segment, 10)
    buffer = open_buffer(tmp_path, **options)
    again = learner(buffer, 1, 1, branch=0, fresh=True)
    assert equation(buffer) == {"issued": 1, "trained": 1}
    assert not buffer.ledger.has_payload(0)
    play(buffer, credits=2)
    step(buffer, again, 1)


def test_what_a_checkpoint_covers_and_a_group_needs_is_refused(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path / "buffer")
    incarnation = learner(buffer)
    play(buffer)
    step(buffer, incarnation, 0)
    checkpoint(buffer, incarnation, tmp_path)  # two groups wait
    buffer.commit(0)
    buffer.database.close()
    (segment,) = (tmp_path / "buffer" / "payloads").glob("*.segment")
    segment.unlink()
    for fresh in (False, True):
        buffer = open_buffer(tmp_path / "buffer")
        with pytest.raises(Refused, match="group 2 is still needed, and a checkpoint covered its segment 0"):
            learner(buffer, 1, 1, branch=0, fresh=fresh)
        assert not buffer.database.dirty
        with pytest.raises(Refused, match="the learner must restart"):
            buffer.batch(0, incarnation, 1)
        buffer.database.close()


def test_how_an_attempt_ended_says_what_was_stored_and_what_the_disk_lost(tmp_path: Path) -> None:
    """The audit takes no measurement of a trajectory that is gone for a contradiction: it must know which."""
    buffer = open_buffer(tmp_path)
    learner(buffer)

    def ended() -> list[str]:
        return [how for (how,) in buffer.database.read("SELECT ended FROM attempts ORDER BY grp, idx")]

    one, two = buffer.issue(0, "a", (0, 0), 2)[0]
    assert put(buffer, trajectory(one)) == "stored"
    assert put(buffer, trajectory(one, reward=0.5)) == "late"
    assert put(buffer, trajectory(two)) == "stored"
    assert ended() == ["stored", "stored"]
    buffer.commit(0)
    buffer.database.close()
    (segment,) = (tmp_path / "payloads").glob("*.segment")
    os.truncate(segment, segment.stat().st_size - 1)
    buffer = open_buffer(tmp_path)
    assert ended() == ["stored", "stored"], "no learner has started without it"
    learner(buffer)
    assert ended() == ["stored", "lost"]
    assert put(buffer, trajectory(two)) == "stored"
    assert ended() == ["stored", "lost"]
