"""Batch b takes the same demonstrations however often it is asked for; a skipped one uses its up; a branch begins at
the cursor of its batch; and none of it is a group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer.core import Buffer
from asyncrl.buffer.rules import Refused
from asyncrl.errors import RunError
from tests.buffer.fakes import demonstrations, equation, learner, open_buffer, play, rules

ALONE: dict[str, Any] = {"groups_per_step": 0, "demonstrations_per_step": 3}


def opened(folder: Path, data: Any = None, **changes: Any) -> Buffer:
    return open_buffer(folder, demonstrations=data or demonstrations(7), **(ALONE | changes))


def draws(buffer: Buffer, incarnation: int, b: int) -> list[int]:
    answer = buffer.batch(0.0, incarnation, b)
    assert answer.state == "ready", answer.why
    return [each.draw for each in buffer.demonstrations.of(answer.batch)]


def finish(buffer: Buffer, incarnation: int, b: int, outcome: Any = "applied") -> None:
    version = buffer.finished(incarnation, b, outcome)
    buffer.published(
        incarnation, buffer.ledger.history.branch, version, f"digest-{buffer.ledger.history.branch}-{version}"
    )


def test_batches_take_the_next_and_the_same_again_after_a_restart(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    incarnation = learner(buffer)
    assert draws(buffer, incarnation, 0) == draws(buffer, incarnation, 0) == [0, 1, 2]
    finish(buffer, incarnation, 0)
    assert draws(buffer, incarnation, 1) == [3, 4, 5]
    buffer.commit(0.0)
    buffer.database.close()
    buffer = opened(tmp_path)
    incarnation = learner(buffer, 0, 0, branch=None)
    assert draws(buffer, incarnation, 0) == [0, 1, 2]
    finish(buffer, incarnation, 0)
    assert draws(buffer, incarnation, 1) == [3, 4, 5]
    finish(buffer, incarnation, 1)
    data = demonstrations(7)
    for each in buffer.demonstrations.of(buffer.ledger.history.line[1]):
        assert each.chat == data.chats.chat(data.row(each.draw))
        assert each.digest == data.digest_of(data.row(each.draw))
    assert draws(buffer, incarnation, 2) == [6, 7, 8]  # into the second epoch
    assert buffer.demonstrations.drawn == 9
    assert equation(buffer) == {"issued": 0}
    assert play(buffer) == []  # no ticket is ever issued


def test_the_ranks_of_a_learner_have_a_batch_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = demonstrations(7)
    buffer = opened(tmp_path, data)
    batch = buffer.batch(0.0, learner(buffer), 0).batch
    reads: list[int] = []
    chat = data.chats.chat
    monkeypatch.setattr(type(data.chats), "chat", lambda _, row: (reads.append(row), chat(row))[1])
    first = buffer.demonstrations.of(batch)
    assert len(reads) == 3
    assert buffer.demonstrations.of(batch) == first
    assert len(reads) == 3


def test_a_skipped_batch_uses_its_up_and_a_branch_begins_at_its_cursor(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    incarnation = learner(buffer)
    for b, outcome in enumerate(["applied", "guard", "applied"]):
        assert draws(buffer, incarnation, b) == [3 * b, 3 * b + 1, 3 * b + 2]
        finish(buffer, incarnation, b, outcome)
    fresh = learner(buffer, 1, 2, branch=0, fresh=True, publish=False)
    buffer.published(fresh, 1, 1, "other-1")
    assert draws(buffer, fresh, 2) == [6, 7, 8]
    finish(buffer, fresh, 2)
    assert draws(buffer, fresh, 3) == [9, 10, 11]


def test_a_batch_that_ends_otherwise_when_it_is_redone_holds_the_same(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    first = learner(buffer)
    for b in range(2):
        draws(buffer, first, b)
        finish(buffer, first, b)
    again = learner(buffer, 0, 0, branch=None)
    assert draws(buffer, again, 0) == [0, 1, 2]
    buffer.finished(again, 0, "guard")
    assert buffer.ledger.history.branch == 1
    assert [each.draw for each in buffer.demonstrations.of(buffer.ledger.history.line[0])] == [0, 1, 2]
    buffer.published(again, 1, 0, "digest-0")
    assert draws(buffer, again, 1) == [3, 4, 5]


def test_beside_groups_they_are_no_groups(tmp_path: Path) -> None:
    buffer = opened(tmp_path, groups_per_step=2)
    incarnation = learner(buffer)
    play(buffer, credits=4)
    answer = buffer.batch(0.0, incarnation, 0)
    assert answer.batch is not None
    assert (len(answer.batch.groups), len(buffer.demonstrations.of(answer.batch))) == (2, 3)
    assert buffer.rules == rules(**(ALONE | {"groups_per_step": 2}))
    counts = equation(buffer)
    assert (counts["issued"], counts["assigned"]) == (2, 2)


def test_a_run_goes_on_with_the_files_that_it_began_with(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    buffer.commit(0.0)
    buffer.database.close()
    with pytest.raises(RunError, match=r"is not what the run began with.*Put the files back"):
        opened(tmp_path, demonstrations(7, of="other "))


def test_a_file_that_changed_since_is_refused_by_name(tmp_path: Path) -> None:
    data = demonstrations(7)
    buffer = opened(tmp_path, data)
    answer = buffer.batch(0.0, learner(buffer), 0)

    def changed(row: int) -> bytes:
        raise RunError(f"row {row} is no longer what it was")

    data.chats.chat = changed  # type: ignore[method-assign]
    with pytest.raises(Refused, match="no longer what it was"):
        buffer.demonstrations.of(answer.batch)
