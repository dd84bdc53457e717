"""The actor's loop against fakes of everything around it: tickets to acknowledged trajectories."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncrl.trajectory import TicketId
from tests.actors.actor_stage import Stage, act, until
from tests.actors.fakes import ticket


def test_tickets_become_acknowledged_trajectories(tmp_path: Path) -> None:
    async def scenario() -> None:
        s = Stage(tmp_path, [ticket(i, group=g) for g in range(3) for i in range(4)])
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: s.actor.tickets.counts.episodes == 12)
        s.stop.set()
        await running
        assert {t.id for t in s.buffer.stored} == {TicketId(0, g, i) for g in range(3) for i in range(4)}
        assert [(a["group"], a["index"], a["digest"]) for a in s.acknowledged()] == [
            (t.id.group, t.id.index, t.digest()) for t in s.buffer.stored
        ]
        assert s.buffer.credits[0] == 4
        assert max(s.buffer.credits) == 4
        assert all(env.closed == 1 for env in s.envs)
        assert s.reporter.sent["throughput/episodes"] == 12
        assert s.reporter.sent["throughput/tokens_generated"] == 48
        assert s.reporter.sent["throughput/slots_busy"] == 0
        assert ("ticket", "buffer: nothing to do") in s.reporter.causes
        assert s.buffer.released == []

    act(scenario)


def test_an_actor_that_plays_more_than_it_has_slots_by_now_asks_for_nothing(tmp_path: Path) -> None:
    """The engine took KV cache away: there are fewer slots than episodes for a while."""

    async def scenario() -> None:
        s = Stage(tmp_path, [ticket(i) for i in range(4)])
        s.engine.gate = asyncio.Event()
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: len(s.actor.tickets.playing) == 4)
        s.actor._concurrency.limit = 2
        s.actor.tickets.changed.set()
        await asyncio.sleep(0.05)
        s.engine.gate.set()
        await until(lambda: s.actor.tickets.counts.episodes == 4)
        s.stop.set()
        await running
        assert min(s.buffer.credits) >= 1

    act(scenario)


def test_the_slots_in_force_come_with_the_next_reply(tmp_path: Path) -> None:
    """More of them: it asks for more. Fewer: it plays what it has, and asks for nothing until that is less."""

    async def scenario() -> None:
        s = Stage(tmp_path, [ticket(i, group=g) for g in range(5) for i in range(4)])
        s.engine.gate = asyncio.Event()
        s.buffer.slots = 3
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: len(s.actor.tickets.playing) == 4)  # as many as it asked for before it was told
        s.buffer.slots = 2
        asked = len(s.buffer.credits)
        await asyncio.sleep(0.1)
        assert len(s.buffer.credits) == asked
        s.engine.gate.set()
        await until(lambda: s.actor.tickets.counts.episodes == 20)
        assert max(s.buffer.credits[asked + 1 :]) == 2
        await until(lambda: s.reporter.sent.get("throughput/slots") == 2)
        s.stop.set()
        await running

    act(scenario)


def test_a_put_is_sent_again_until_it_is_acknowledged(tmp_path: Path) -> None:
    async def scenario() -> None:
        s = Stage(tmp_path, [ticket()])
        s.buffer.silent = 2
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: s.actor.tickets.counts.episodes == 1)
        s.stop.set()
        await running
        assert len(s.buffer.stored) == len(s.acknowledged()) == 1
        assert ("buffer", "buffer") in s.reporter.causes

    act(scenario)


@pytest.mark.parametrize(("outcome", "lines"), [("stored", 1), ("duplicate", 1), ("late", 0)])
def test_only_what_is_stored_is_logged(tmp_path: Path, outcome: str, lines: int) -> None:
    async def scenario() -> None:
        s = Stage(tmp_path, [ticket(), ticket(1, kind="eval")])
        s.buffer.outcome = outcome
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: s.actor.tickets.counts.episodes == 2)
        s.stop.set()
        await running
        assert len(s.acknowledged()) == lines

    act(scenario)
