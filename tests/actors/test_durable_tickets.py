"""An actor whose tickets have durable turns: what it records, what a refusal and a revocation do, and how it leaves."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.actors.envs.protocol import Turn
from asyncrl.audit.actor_logs import read_logs
from asyncrl.buffer.client import BufferRefused
from asyncrl.trajectory import Ticket
from asyncrl.trajectory.turns import RecordedSample
from tests.actors.actor_stage import Stage, act, until
from tests.actors.episodes.recorded.counters import Snapshots
from tests.actors.fakes import SAID, CutEngine, FakeEngine, FakeEnv, ticket


def durable(index: int = 0) -> Ticket:
    return replace(ticket(index), durable=True)


def test_the_turns_of_an_episode_are_recorded_and_its_trajectory_is_put(tmp_path: Path) -> None:
    async def scenario() -> None:
        s = Stage(tmp_path, [durable(0), ticket(1)], env=lambda: Snapshots(3))  # type: ignore[arg-type]
        s.buffer.silent = 1
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: len(s.buffer.stored) == 2)
        s.stop.set()
        await running
        places = [record.place for id, attempt, record in s.buffer.turns if (id.index, attempt) == (0, 1)]
        assert places == [(-1, True), (0, False), (0, True), (1, False), (1, True), (2, False)]
        assert {id.index for id, _, _ in s.buffer.turns} == {0}, "the other ticket is not durable"
        (log,) = read_logs(tmp_path / "acks").values()
        lines = [(line.index, line.attempt, line.number, line.form) for line in log.turns]
        recorded = [(id.index, attempt, each.place[0], each.form) for id, attempt, each in s.buffer.turns]
        assert lines == recorded, "of each that the buffer has acknowledged"

    act(scenario)


def test_a_revoked_attempt_ends_without_a_word(tmp_path: Path) -> None:
    async def scenario() -> None:
        Snapshots.carried_out = 0
        s = Stage(tmp_path, [durable()], env=lambda: Snapshots(3))  # type: ignore[arg-type]
        s.buffer.turn_outcome = "revoked"
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: bool(s.engine.said) and not s.actor.tickets.playing)
        s.stop.set()
        await running
        assert (s.buffer.failed, s.buffer.stored, Snapshots.carried_out) == ([], [], 0)

    act(scenario)


@pytest.mark.parametrize(("code", "told"), [("bad_turn", True), ("old_tokens", False)])
def test_a_refused_turn_fails_the_episode(tmp_path: Path, code: str, told: bool) -> None:
    async def scenario() -> None:
        s = Stage(tmp_path, [durable()], env=lambda: Snapshots(3))  # type: ignore[arg-type]
        s.buffer.turn_outcome = BufferRefused("turn", code, "no")
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: bool(s.engine.said) and not s.actor.tickets.playing)
        s.stop.set()
        await running
        assert [reason for _, _, reason, _ in s.buffer.failed] == ["env_error"] * told

    act(scenario)


class CutLater(CutEngine):
    """Only the second turn waits for its abort."""

    async def generate(self, request: str, prompt: Any, sampling: Any) -> Any:
        if request.endswith("/0"):
            return await FakeEngine.generate(self, request, prompt, sampling)
        return await super().generate(request, prompt, sampling)


def test_told_to_stop_it_hands_over_any_turn(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = CutLater(2)
        s = Stage(tmp_path, [durable()], engine=engine, drain_s=0.4, env=lambda: Snapshots(3))  # type: ignore[arg-type]
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: bool(engine.running))
        s.stop.set()
        await running
        assert [lease[0].index for lease in s.buffer.released] == [0]
        last = s.buffer.turns[-1][2]
        assert isinstance(last, RecordedSample)
        assert (last.number, last.partial, last.token_ids.tolist()) == (1, True, SAID[:2])
        assert s.buffer.failed == []
        assert s.reporter.sent["throughput/tokens_wasted/aborted"] == 0

    act(scenario)


def test_told_to_stop_without_room_on_the_disk_it_hands_over_what_is_recorded(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO")

    async def scenario() -> None:
        engine = CutLater(2)
        s = Stage(tmp_path, [durable()], engine=engine, drain_s=0.4, env=lambda: Snapshots(3))  # type: ignore[arg-type]
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: bool(engine.running))
        s.buffer.turn_outcome = "full"
        s.stop.set()
        await running
        assert [lease[0].index for lease in s.buffer.released] == [0]
        assert s.buffer.failed == []
        assert s.buffer.turns[-1][2].place == (0, True)
        assert "1 tickets, 0 with sampled tokens" in caplog.text

    act(scenario)


def test_told_to_stop_during_a_step_it_hands_over_the_turn_before_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        class Slow(FakeEnv):
            replayable = True

            async def step(self, message: Any) -> Turn:
                await asyncio.sleep(600)
                return Turn(done=True)

        s = Stage(tmp_path, [durable()], drain_s=0.1, env=lambda: Slow([]))
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: len(s.buffer.turns) == 2)
        s.stop.set()
        await running
        assert [lease[0].index for lease in s.buffer.released] == [0]
        assert [record.place for _, _, record in s.buffer.turns] == [(-1, True), (0, False)]
        assert all(env.closed == 1 for env in s.envs)

    act(scenario)


def test_an_episode_that_waits_for_the_buffer_is_not_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        s = Stage(tmp_path, [durable()], env=lambda: Snapshots(2), idle_s=0.05)  # type: ignore[arg-type]
        s.buffer.silent = 4  # for a second or so
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: len(s.buffer.stored) == 1)
        s.stop.set()
        await running
        assert s.buffer.failed == []

    act(scenario)
