"""What an actor does when episodes, leases, the engine end, and when it is told to stop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncrl.actors.engines.protocol import EngineDied
from asyncrl.actors.envs.protocol import Turn
from asyncrl.buffer.client import BufferRefused
from asyncrl.trajectory import TicketId
from tests.actors.actor_stage import Stage, act, until
from tests.actors.fakes import FakeEnv, ticket


def test_a_failing_environment_costs_its_episode_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        def env() -> FakeEnv:
            return FakeEnv([ValueError("boom")] if len(s.envs) == 0 else [Turn(done=True)])

        s = Stage(tmp_path, [ticket(0), ticket(1)], env=env)
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: s.actor.tickets.counts.episodes == 1 and len(s.buffer.failed) == 1)
        s.stop.set()
        await running
        ((id, attempt, reason, detail),) = s.buffer.failed
        assert (id, attempt, reason) == (TicketId(0, 0, 0), 1, "env_error")
        assert "boom" in detail
        assert s.reporter.sent["throughput/tokens_wasted/aborted"] == 2

    act(scenario)


@pytest.mark.parametrize(
    ("code", "failures"), [("bad_trajectory", 1), ("unknown_ticket", 0), ("wrong_actor", 0), ("old_tokens", 0)]
)
def test_a_refused_trajectory_is_no_reason_to_end(tmp_path: Path, code: str, failures: int) -> None:
    async def scenario() -> None:
        s = Stage(tmp_path, [ticket()])
        s.buffer.outcome = BufferRefused("put", code, "no")
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: s.actor.tickets.counts.aborted_tokens == 4)
        s.stop.set()
        await running
        assert [reason for _, _, reason, _ in s.buffer.failed] == ["env_error"] * failures
        assert s.acknowledged() == []

    act(scenario)


def test_a_refused_failure_is_no_reason_to_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        s = Stage(tmp_path, [ticket()])
        s.buffer.outcome, s.buffer.refuses = BufferRefused("put", "malformed", "no"), BufferRefused("fail", "x", "no")
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: bool(s.buffer.failed) and not s.actor.tickets.putting)
        s.stop.set()
        await running

    act(scenario)


class Waits(FakeEnv):
    async def step(self, message: Any) -> Turn:
        await asyncio.sleep(60)
        return Turn(done=True)


def test_an_episode_without_progress_is_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        s = Stage(tmp_path, [ticket()], env=lambda: Waits([]), idle_s=0.1)
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: bool(s.buffer.failed))
        s.stop.set()
        await running
        assert s.buffer.failed[0][2] == "timeout"
        assert "episode_idle_s" in s.buffer.failed[0][3]
        assert ("environment", "lookup") in s.reporter.causes
        assert s.envs[0].closed == 1

    act(scenario)


def test_a_revoked_lease_ends_the_episode_silently(tmp_path: Path) -> None:
    async def scenario() -> None:
        s = Stage(tmp_path, [ticket(0), ticket(1)], env=lambda: Waits([]))
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: sum(bool(e.heard) or e.task != {} for e in s.envs) == 2)
        s.revoked.append((TicketId(0, 0, 0), 1))
        await until(lambda: s.envs[0].closed == 1)
        assert s.envs[1].closed == 0
        s.stop.set()
        await running
        assert s.buffer.failed == []
        assert s.buffer.released == [(TicketId(0, 0, 1), 1)]

    act(scenario)


def test_a_dead_engine_ends_the_actor(tmp_path: Path) -> None:
    async def scenario() -> None:
        def dies(*_: Any) -> list[int]:
            raise EngineDied("out of memory")

        s = Stage(tmp_path, [ticket()], script=dies)
        with pytest.raises(EngineDied, match="out of memory"):
            await s.actor.run(s.stop)
        assert s.buffer.failed == []

    act(scenario)
