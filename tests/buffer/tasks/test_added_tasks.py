"""Tasks that the run adds to its own: drawn next, once each, and those of the recorded batches after whatever crash."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.audit.checks.tasks.curriculum import curriculum as audited
from asyncrl.audit.reading import read_ledger
from asyncrl.buffer.core import Buffer
from asyncrl.config import Config
from asyncrl.data.added_tasks import ADDED, OnStepEnd, open_on_step_end
from asyncrl.data.base import GroupResult
from asyncrl.errors import ConfigError, RunError
from tests.buffer.fakes import FakeCurriculum, equation, learner, open_buffer, play, reopen, step

MORE = f"{__name__}:harder"


def harder(version: int, results: Sequence[GroupResult], tasks: Sequence[Any], most: int = 1) -> list[dict[str, Any]]:
    """A variation of the first tasks that were solved, none of a variation."""
    solved = [task for result, task in zip(results, tasks, strict=True) if min(result.rewards) > 0]
    first = [task for task in solved if not str(task["id"]).startswith("added/")][:most]
    return [{"prompt": f"{task['prompt']}, harder after {version}", "of": task["id"]} for task in first]


def broken(version: int, results: Sequence[GroupResult], tasks: Sequence[Any]) -> Any:
    return [{"question": "no prompt"}]


def opened(folder: Path) -> Buffer:
    return open_buffer(folder, on_step_end=OnStepEnd(MORE, {}))


def rows(buffer: Buffer) -> list[tuple[Any, ...]]:
    return list(buffer.database.read("SELECT batch, draw, released FROM added ORDER BY serial"))


def tasks_of(buffer: Buffer) -> list[tuple[int, str]]:
    return list(buffer.database.read("SELECT draw, task_id FROM groups WHERE replaces IS NULL ORDER BY draw"))


def test_what_a_step_adds_is_drawn_next_and_the_source_loses_nothing(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    incarnation = learner(buffer)
    play(buffer, reward=1.0)  # four groups: tasks 0 to 3
    step(buffer, incarnation, 0)
    tickets = play(buffer, reward=1.0)
    assert tickets[0].task == {"id": "added/1", "prompt": "epoch 0, harder after 1", "of": "task-0"}
    step(buffer, incarnation, 1)
    play(buffer, reward=1.0)
    named = [task_id for _, task_id in tasks_of(buffer)]
    assert [name for name in named if not name.startswith("added")] == [f"task-{i}" for i in range(len(named) - 2)]
    assert named[4] == "added/1"
    equation(buffer)
    buffer.commit(0)
    assert list(audited(read_ledger(tmp_path), _in_order())) == []


@pytest.mark.parametrize("committed", [True, False])
def test_after_a_crash_the_rows_are_those_of_the_last_recorded_batch(tmp_path: Path, committed: bool) -> None:
    buffer = opened(tmp_path)
    incarnation = learner(buffer)
    play(buffer, reward=1.0)
    step(buffer, incarnation, 0)
    buffer.commit(0)
    play(buffer, reward=1.0)
    step(buffer, incarnation, 1)
    before = rows(buffer)
    buffer = reopen(buffer, tmp_path, commit=committed, on_step_end=OnStepEnd(MORE, {}))
    assert rows(buffer) == (before if committed else [(1, None, 0)])
    again = learner(buffer, version=1, batch=1, branch=0)
    play(buffer, reward=1.0)
    step(buffer, again, 1)
    assert [batch for batch, _, _ in rows(buffer)] == [1, 2], "the same rows came of the same results, once"
    play(buffer, reward=1.0)
    draws = [draw for _, draw, _ in rows(buffer) if draw is not None]
    assert len(draws) == len(set(draws)) > 0
    buffer.commit(0)
    assert list(audited(read_ledger(tmp_path), _in_order())) == []


def test_a_fork_voids_what_later_batches_added_and_nobody_drew(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    incarnation = learner(buffer)
    for b in range(3):
        play(buffer, reward=1.0)
        step(buffer, incarnation, b)
    started = buffer.start(1, 1, 0, fresh=True)
    assert [released for _, _, released in rows(buffer)] == [0, 1, 1]
    buffer.published(started.incarnation, 1, 1, "d")
    for b in (1, 2):
        tickets = play(buffer, reward=1.0)
        assert all(ticket.task["prompt"] for ticket in tickets), "also those of rows that were drawn and put back"
        step(buffer, started.incarnation, b)
    buffer.commit(0)
    assert list(audited(read_ledger(tmp_path), _in_order())) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("UPDATE added SET draw = 3 WHERE serial = 1", "is of an added row, which is recorded as draw 3"),
        ("UPDATE added SET batch = 7 WHERE serial = 1", "is of a row that batch 7 added"),
        (f"UPDATE groups SET task = {ADDED + 2} WHERE task = {ADDED + 1}", "is of an added row"),
    ],
)
def test_the_audit_finds_a_row_that_was_not_drawn_so(tmp_path: Path, change: str, expected: str) -> None:
    buffer = opened(tmp_path)
    incarnation = learner(buffer)
    for b in range(2):
        play(buffer, reward=1.0)
        step(buffer, incarnation, b)
    play(buffer)
    buffer.database.write(change)
    buffer.commit(0)
    assert any(expected in line for line in audited(read_ledger(tmp_path), _in_order()))


def test_a_curriculum_is_not_told_of_what_is_not_its_source_s(tmp_path: Path) -> None:
    taught = FakeCurriculum()
    buffer = open_buffer(tmp_path, curriculum=taught, on_step_end=OnStepEnd(MORE, {"most": 2}))
    incarnation = learner(buffer)
    for b in range(3):
        play(buffer, reward=1.0)
        step(buffer, incarnation, b)
    assert all(result.index < ADDED for _, results in taught.told for result in results)


def test_a_function_that_fails_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, on_step_end=OnStepEnd(f"{__name__}:broken", {}))
    incarnation = learner(buffer)
    play(buffer)
    with pytest.raises(
        RunError, match=r"on_step_end is '.*:broken', which failed at version 1: TypeError: it returned .*question"
    ):
        step(buffer, incarnation, 0)


def test_it_is_named_in_the_config() -> None:
    assert open_on_step_end(Config()) is None
    given = {"data": {"on_step_end": MORE, "on_step_end_options": {"most": 0}}}
    made = open_on_step_end(Config.model_validate(given))
    assert made is not None
    assert made(1, [GroupResult(0, "t", (1.0,))], [{"id": "t", "prompt": "p"}]) == []
    given["data"]["on_step_end_options"] = {"least": 1}
    with pytest.raises(ConfigError, match=r"data\.on_step_end_options\.least: harder has no such option"):
        open_on_step_end(Config.model_validate(given))
    assert (
        json.loads(OnStepEnd(MORE, {})(1, [GroupResult(0, "t", (1.0,))], [{"id": "t", "prompt": "p"}])[0])["of"] == "t"
    )


def _in_order() -> Any:
    from asyncrl.data.curricula import InOrder

    return InOrder()
