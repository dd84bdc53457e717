"""Which task is drawn: the curriculum's state is that of the last recorded batch, after whatever crash or fork."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from asyncrl.audit.checks.tasks.curriculum import curriculum as audited
from asyncrl.audit.reading import read_ledger
from asyncrl.buffer.core import Buffer
from asyncrl.buffer.tasks.sources import open_curriculum, open_source
from asyncrl.config import Config
from asyncrl.data.base import GroupResult
from asyncrl.errors import ConfigError, RunError
from tests.buffer.fakes import FakeCurriculum, FakeSource, learner, open_buffer, play, reopen, step


def states(buffer: Buffer) -> Iterator[tuple[int, int, int]]:
    """(batch, width, released) of every state."""
    for batch, state, released in buffer.database.read("SELECT batch, state, released FROM curriculum ORDER BY serial"):
        yield batch, json.loads(state)["width"], released


def trained(folder: Path, steps: int) -> tuple[Buffer, int, FakeCurriculum]:
    """Every group is solved, so the width grows with each."""
    taught = FakeCurriculum()
    buffer = open_buffer(folder, curriculum=taught)
    incarnation = learner(buffer)
    for b in range(steps):
        play(buffer, reward=1.0)
        step(buffer, incarnation, b)
    return buffer, incarnation, taught


def test_every_complete_group_is_told_once_with_the_outcome_after_it(tmp_path: Path) -> None:
    buffer, incarnation, taught = trained(tmp_path, 1)
    version, results = taught.told[0]
    assert version == 1
    assert results[0] == GroupResult(0, "task-0", (1.0, 1.0))
    assert len(results) == 4  # two of them wait; they were measured all the same
    step(buffer, incarnation, 1)
    assert taught.told[1] == (2, [])
    assert list(states(buffer)) == [(0, 1, 0), (1, 5, 0), (2, 5, 0)]
    play(buffer)
    assert [g.task for g in buffer.ledger.live.values()] == [n % 5 for n in range(4, 8)]


def test_a_group_that_a_filter_dropped_is_told_too(tmp_path: Path) -> None:
    taught = FakeCurriculum()
    buffer = open_buffer(tmp_path, curriculum=taught, filters=(lambda group: group.number == 0,))
    incarnation = learner(buffer)
    play(buffer, reward=1.0)
    step(buffer, incarnation, 0)
    dropped = buffer.ledger.load(0)
    assert dropped is not None
    assert (dropped.reason, dropped.measured) == ("filtered", 2)
    assert len(taught.told[0][1]) >= 4


@pytest.mark.parametrize("committed", [True, False])
def test_after_a_crash_the_state_is_that_of_the_last_recorded_batch(tmp_path: Path, committed: bool) -> None:
    buffer, incarnation, taught = trained(tmp_path, 1)
    buffer.commit(0)
    width = taught.width
    play(buffer, reward=1.0)
    step(buffer, incarnation, 1)
    assert taught.width > width
    again = FakeCurriculum()
    buffer = reopen(buffer, tmp_path, commit=committed, curriculum=again)
    assert again.width == (taught.width if committed else width)
    assert buffer.ledger.unmeasured.groups == []


def test_a_group_that_the_disk_took_apart_is_not_told_by_a_branch_before_it_is_complete_again(tmp_path: Path) -> None:
    buffer, _, _ = trained(tmp_path, 1)
    buffer.issue(0.0, "actor-0", (0, 1), 1)
    (group,) = (g for g in buffer.ledger.live.values() if g.state == "in_flight")
    group.measured = 2  # as of one whose trajectories were stored and told, and were lost since
    buffer.ledger.unmeasured.forked(1, [group])
    assert group.measured is None
    assert group not in buffer.ledger.unmeasured.groups


def test_groups_completed_before_a_crash_are_told_after_it(tmp_path: Path) -> None:
    buffer, _, taught = trained(tmp_path, 1)
    played = len(play(buffer, reward=1.0)) // 2
    again = FakeCurriculum()
    buffer = reopen(buffer, tmp_path, curriculum=again)
    step(buffer, learner(buffer, 1, 1, branch=0), 1)
    assert len(again.told[0][1]) == played > 0
    assert again.width == taught.width + played


def test_batches_that_are_redone_teach_nothing_twice(tmp_path: Path) -> None:
    buffer, _, taught = trained(tmp_path, 2)
    width = taught.width
    second = learner(buffer)
    step(buffer, second, 0)
    step(buffer, second, 1)
    assert taught.width == width
    assert len(list(states(buffer))) == 3


def test_a_fresh_start_at_an_earlier_step_has_the_state_and_the_cursor_of_that_step(tmp_path: Path) -> None:
    buffer, _, taught = trained(tmp_path, 3)
    width = {batch: w for batch, w, _ in states(buffer)}
    drawn = buffer.ledger.next_draw
    started = buffer.start(1, 1, 0, fresh=True)
    assert (started.branch, started.batch, started.version) == (1, 1, 1)
    assert taught.width == width[1] < width[3]
    assert [released for _, _, released in states(buffer)] == [0, 0, 1, 1]
    buffer.published(started.incarnation, 1, 1, "d")
    put_back = [row[0] for row in buffer.database.read("SELECT number FROM groups WHERE put_back = 1 ORDER BY number")]
    for b in (1, 2):
        play(buffer, reward=1.0)
        step(buffer, started.incarnation, b)
        assert taught.told[-1][0] == b + 1
    again = [r[0] for r in buffer.database.read("SELECT replaces FROM groups WHERE branch = 1 ORDER BY number")]
    assert put_back  # the draws made after step 1 are made again, in their order; none is skipped, none comes first
    assert again[: len(put_back)] == put_back[: len(again)]
    assert buffer.ledger.next_draw == drawn + max(0, len(again) - len(put_back))
    buffer.commit(0)
    assert list(audited(read_ledger(tmp_path), FakeCurriculum())) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("UPDATE groups SET task = task + 1 WHERE number = 5", "draw 5 (group 5) is of task"),
        ("UPDATE trajectories SET reward = 0 WHERE grp = 1 AND idx = 0", "the rewards make it"),
        ("""UPDATE curriculum SET state = '{"width":2}' WHERE batch = 1""", "the rewards make it"),
        ("DELETE FROM curriculum WHERE batch = 1", "which is not in the ledger"),
        ("UPDATE groups SET measured = NULL WHERE number = 0", "the rewards make it"),
    ],
)
def test_the_audit_draws_everything_again(tmp_path: Path, change: str, expected: str) -> None:
    buffer, _, _ = trained(tmp_path, 3)
    buffer.commit(0)
    assert list(audited(read_ledger(tmp_path), FakeCurriculum())) == []
    buffer.database.write(change)
    buffer.commit(0)
    assert any(expected in line for line in audited(read_ledger(tmp_path), FakeCurriculum()))


def test_what_was_measured_per_task_can_be_asked(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, curriculum=FakeCurriculum())
    incarnation = learner(buffer)
    play(buffer)  # rewards 0, 1
    step(buffer, incarnation, 0)
    assert list(buffer.database.read("SELECT * FROM difficulty")) == [("task-0", 4, 8, 0.5)]


def test_a_curriculum_is_named_in_the_config() -> None:
    config = Config.model_validate({"data": {"curriculum": f"{__name__}:Seeded", "curriculum_options": {"step": 3}}})
    made = open_curriculum(config, open_source(config))
    assert isinstance(made, Seeded)
    assert (made.seed, made.train_size, made.step) == (0, None, 3)
    with pytest.raises(ConfigError, match=r"data\.curriculum: .*in_order"):
        open_curriculum(Config.model_validate({"data": {"curriculum": "in_orde"}}), open_source(config))


class Seeded(FakeCurriculum):
    def __init__(self, seed: int, train_size: int | None, step: int = 1) -> None:
        super().__init__()
        self.seed, self.train_size, self.step = seed, train_size, step


@pytest.mark.parametrize("value", [datetime(2026, 1, 1), {1: "an answer"}, 1 << 70, "\udcff", {1, 2}])
def test_a_task_that_no_ticket_can_carry_is_named(tmp_path: Path, value: Any) -> None:
    class Source(FakeSource):
        def task(self, index: int) -> dict[str, Any]:
            return super().task(index) | ({"info": value} if index == 1 else {})

        def held_out(self, index: int) -> dict[str, Any]:
            return super().held_out(index) | {"info": value}

    buffer = open_buffer(tmp_path, source=Source(), eval_tasks=1)
    learner(buffer)
    assert len(buffer.issue(0, "a", (0, 0), 2)[0]) == 2
    with pytest.raises(RunError, match=r"data\.source gave task 1, which no ticket can carry"):
        buffer.issue(0, "a", (0, 0), 2)
    buffer.evaluate((0, 0))
    with pytest.raises(RunError, match=r"data\.source gave held-out task 0, "):
        buffer.issue(0, "a", (0, 0), 1)


def test_numbers_and_strings_of_numpy_are_pythons_in_a_ticket(tmp_path: Path) -> None:
    """msgpack takes them, and msgspec, which encodes replies, does not."""

    class Source(FakeSource):
        def task(self, index: int) -> dict[str, Any]:
            given = super().task(index) | {"template": np.str_("a"), "level": np.float64(0.5), "of": [np.str_("b")]}
            return given | {"id": np.str_(given["id"])}

    buffer = open_buffer(tmp_path, source=Source())
    learner(buffer)
    for ticket in buffer.issue(0, "a", (0, 0), 2)[0]:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(ticket.task)) == dict(ticket.task)


def test_an_id_under_which_no_trajectory_could_be_stored_is_named(tmp_path: Path) -> None:
    class Source(FakeSource):
        def task(self, index: int) -> dict[str, Any]:
            return super().task(index) | {"id": "x" * 1025}

    buffer = open_buffer(tmp_path, source=Source())
    learner(buffer)
    with pytest.raises(RunError, match=r"data\.source gave task 0 an id of 1025 characters, .* at most 1024"):
        buffer.issue(0, "a", (0, 0), 2)
