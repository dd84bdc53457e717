"""A row whose source raises costs that row: the buffer goes on, and an actor fails its attempts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncrl.actors.episodes.environment_calls import EpisodeFailed
from asyncrl.actors.episodes.progress import Progress
from asyncrl.actors.player import player
from asyncrl.config import Config
from asyncrl.data.checked import UNREADABLE
from tests.actors.fakes import FakeEngine, FakeRenderer
from tests.buffer.fakes import FakeSource, equation, learner, open_buffer, put, reopen, trajectory


class BrokenRows(FakeSource):
    """A fake whose second task and second held-out task raise."""

    def task(self, index: int) -> dict[str, Any]:
        if index == 1:
            raise KeyError("answer")
        return super().task(index)

    def held_out(self, index: int) -> dict[str, Any]:
        return {"question": "no prompt"} if index == 1 else super().held_out(index)


def test_the_buffer_issues_it_all_the_same_and_drops_it_when_it_fails(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, source=BrokenRows(), env_retries=0)
    learner(buffer)
    tickets, _ = buffer.issue(0.0, "actor-0", (0, 0), 6)
    by_group = {ticket.id.group: ticket for ticket in tickets}
    assert [UNREADABLE in by_group[group].task for group in (0, 1, 2)] == [False, True, False]
    broken = by_group[1]
    assert "KeyError: 'answer' (" in broken.task[UNREADABLE]
    buffer.fail("actor-0", broken.id, broken.attempt, "env_error", broken.task[UNREADABLE])
    put(buffer, trajectory(by_group[0]))
    assert equation(buffer)["dropped: env_error"] == 1
    buffer = reopen(buffer, tmp_path, source=BrokenRows(), env_retries=0)
    assert equation(buffer)["dropped: env_error"] == 1


def test_a_held_out_row_costs_its_own_episodes(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, source=BrokenRows(), eval_tasks=2, env_retries=0)
    learner(buffer)
    buffer.evaluate((0, 0))
    tickets, _ = buffer.issue(0.0, "actor-0", (0, 0), 8)
    assert [UNREADABLE in ticket.task for ticket in tickets] == [False, False, True, True]
    assert "a task without 'id': its keys are question" in tickets[2].task[UNREADABLE]


def test_an_actor_fails_it_without_asking_the_environment(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, source=BrokenRows())
    learner(buffer)
    broken = next(t for t in buffer.issue(0.0, "actor-0", (0, 0), 6)[0] if UNREADABLE in t.task)

    async def scenario() -> None:
        async with player(Config(), FakeEngine(lambda *_: []), FakeRenderer(), actor="actor-0") as play:
            with pytest.raises(EpisodeFailed, match=r"env_error: data\.source gave no task 1: KeyError: 'answer'"):
                await play(broken, Progress(0.0))

    asyncio.run(scenario())
