"""Steps that would be, or were, redone with other weights: the buffer begins a branch, or refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer.batches.redone import changed_since, first_in_doubt
from asyncrl.buffer.core import Buffer
from asyncrl.buffer.ledger.records import Batch, Incarnation
from asyncrl.buffer.rules import Refused
from tests.buffer.fakes import learner, open_buffer, play, reopen, step

FIRST, SECOND = ({"settings": json.dumps({"learner.lr": lr})} for lr in (0.1, 0.2))


def trained(folder: Path, batches: int, **rules: Any) -> tuple[Buffer, int]:
    """A buffer with batches that were applied, and the incarnation that trained on them."""
    buffer = open_buffer(folder, **rules)
    incarnation = learner(buffer)
    for b in range(batches):
        play(buffer)
        step(buffer, incarnation, b)
    play(buffer)
    return buffer, incarnation


def line(*outcomes: str | None, incarnation: int = 1) -> list[Batch]:
    versions = [sum(o == "applied" for o in outcomes[:b]) for b in range(len(outcomes))]
    return [Batch(b + 1, b, 0, versions[b], incarnation, 1, (b,), o) for b, o in enumerate(outcomes)]  # type: ignore[arg-type]


def start(number: int, next_batch: int, lr: float) -> Incarnation:
    return Incarnation(number, 0, next_batch, next_batch, settings=json.dumps({"learner.lr": lr}))


NOW = json.dumps({"learner.lr": 0.2})


@pytest.mark.parametrize(
    ("batches", "starts", "b", "changed"),
    [
        (line("applied", "applied"), [start(1, 2, 0.1)], 1, True),
        (line("applied", "applied"), [start(1, 2, 0.2)], 1, False),
        (line("applied", "applied"), [start(1, 2, 0.1)], 2, False),  # nothing is redone
        (line("applied", None), [start(1, 1, 0.1)], 1, False),  # nothing came of the open batch
        (line("applied", "poison"), [start(1, 2, 0.1)], 1, False),  # nobody redoes a skipped one
        # The open batch of the first was finished by the second, which had the settings of now.
        (line("applied", "applied"), [start(1, 1, 0.1), start(2, 2, 0.2)], 1, False),
        (line("applied", "applied"), [start(1, 1, 0.1), start(2, 2, 0.2)], 0, True),
        # The second redid what the first had trained on.
        (line("applied", "applied"), [start(1, 2, 0.1), start(2, 1, 0.1), start(3, 2, 0.2)], 1, True),
    ],
)
def test_who_trained_on_a_batch_first_decides(
    batches: list[Batch], starts: list[Incarnation], b: int, changed: bool
) -> None:
    why = changed_since(batches, starts, b, NOW)
    assert bool(why) == changed
    assert not why or why.endswith("was trained with other settings: learner.lr was 0.1 and is 0.2")


def test_the_first_batch_in_doubt_follows_on_the_last_version_that_was_published() -> None:
    batches = line("applied", "guard", "applied", "applied", "applied")
    assert [b.version for b in batches] == [0, 1, 1, 2, 3]
    assert first_in_doubt(batches, [0, 1, 2, 3, 4], 0, 4) == 4
    assert first_in_doubt(batches, [0, 1, 4], 0, 4) == 1
    assert first_in_doubt(batches, [0, 1, 4], 2, 4) == 2, "not before the start"
    assert first_in_doubt(batches, [4], 3, 4) == 3


def test_a_start_with_other_settings_begins_a_branch_where_steps_would_be_redone(tmp_path: Path) -> None:
    buffer, _ = trained(tmp_path, 3, **FIRST)
    buffer = reopen(buffer, tmp_path, **SECOND)
    started = buffer.start(1, 1, 0)
    assert (started.branch, started.version, started.published) == (1, 1, -1)
    assert started.why == "batch 1 was trained with other settings: learner.lr was 0.1 and is 0.2"
    assert len(buffer.ledger.history.line) == 1
    assert all((g.newest or 0) <= 1 for g in buffer.ledger.live.values())
    buffer.published(started.incarnation, 1, 1, "d")
    play(buffer)
    step(buffer, started.incarnation, 1)
    again = buffer.start(1, 1, 0)
    assert (again.branch, again.why) == (1, ""), "the branch was trained with the settings of now"


def test_a_change_is_not_forgotten_by_starts_that_redo_nothing(tmp_path: Path) -> None:
    """The newest checkpoint is later moved away: what lies before the change is redone after all."""
    buffer, _ = trained(tmp_path, 2, **FIRST)
    buffer = reopen(buffer, tmp_path, **SECOND)
    assert buffer.start(2, 2, 0).branch == 0, "nothing is redone"
    buffer = reopen(buffer, tmp_path, **SECOND)
    assert buffer.start(1, 1, 0).branch == 1


def test_the_same_settings_begin_no_branch(tmp_path: Path) -> None:
    buffer, _ = trained(tmp_path, 3, **FIRST)
    buffer = reopen(buffer, tmp_path, **FIRST)
    assert buffer.start(1, 1, 0).branch == 0


def test_another_digest_of_a_redone_version_begins_a_branch_with_the_same_batches(tmp_path: Path) -> None:
    buffer, _ = trained(tmp_path, 3)
    groups = [batch.groups for batch in buffer.ledger.history.line]
    started = buffer.start(1, 1, 0)
    assert buffer.published(started.incarnation, 0, 1, "digest-1") == 0
    for b in (1, 2):
        assert buffer.batch(0, started.incarnation, b).state == "ready"
        buffer.finished(started.incarnation, b, "applied")
        if b == 1:
            assert buffer.published(started.incarnation, 0, 2, "digest-2") == 0, "redone as it was"
    assert buffer.published(started.incarnation, 0, 3, "another") == 1
    history = buffer.ledger.history
    assert (history.branch, history.version, history.published) == (1, 3, None)
    assert [(batch.branch, batch.groups, batch.outcome) for batch in history.line] == [
        (0, groups[0], "applied"), (0, groups[1], "applied"), (1, groups[2], "applied"),
    ]  # fmt: skip
    assert all((g.newest or 0) <= 2 for g in buffer.ledger.live.values()), "none of the weights that are gone"
    assert buffer.published(started.incarnation, 1, 3, "another") == 1
    play(buffer)
    step(buffer, started.incarnation, 3)
    assert [why for (why,) in buffer.database.read("SELECT why FROM branches WHERE branch = 1")] == [
        "version 3 was published with the digest digest-3, and was redone as another"
    ]


def test_other_weights_without_a_step_in_between_are_refused(tmp_path: Path) -> None:
    buffer, _ = trained(tmp_path, 2)
    for b, branch in ((0, None), (1, 0)):
        started = buffer.start(b, b, branch)
        with pytest.raises(Refused, match=r"holds other weights than it did\. Put back") as refused:
            buffer.published(started.incarnation, 0, b, "another")
        assert refused.value.code == "other_weights"
        assert buffer.ledger.history.branch == 0
        assert buffer.published(started.incarnation, 0, b, f"digest-{b}") == 0
