"""When an actor takes over new weights."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

from tests.actors.actor_stage import DEADLINE_S, Stage, act, until
from tests.actors.fakes import ticket


def test_nothing_is_asked_before_weights_are_held(tmp_path: Path) -> None:
    async def scenario() -> None:
        s = Stage(tmp_path, [ticket()])
        s.subscriber.version = None
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: s.reporter.causes[-1:] == [("weights", "learner")])
        await asyncio.sleep(0.1)
        assert s.buffer.credits == []
        s.subscriber.version = (1, 5)
        await until(lambda: s.actor.tickets.counts.episodes == 1)
        s.stop.set()
        await running
        assert set(s.buffer.held) == {(1, 5)}
        assert s.buffer.stored[0].newest_version == 5

    act(scenario)


def test_new_weights_are_taken_between_tokens_and_told_to_the_buffer(tmp_path: Path) -> None:
    async def scenario() -> None:
        s = Stage(tmp_path, [])
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: bool(s.buffer.held))
        s.subscriber.version = (0, 1)
        await until(lambda: s.buffer.held[-1] == (0, 1))
        s.subscriber.corrupt, s.subscriber.version = True, (0, 2)
        await asyncio.sleep(0.1)
        assert s.buffer.held[-1] == (0, 1)
        s.subscriber.corrupt = False
        await until(lambda: s.buffer.held[-1] == (0, 2))
        s.subscriber.version = (1, 0)  # a later branch starts at a lower version
        await until(lambda: s.buffer.held[-1] == (1, 0))
        s.subscriber.version = (0, 9)
        await asyncio.sleep(0.1)
        assert s.buffer.held[-1] == (1, 0)
        s.stop.set()
        await running
        assert s.engine.log[:3] == ["pause True", "load (0, 0)", "resume"]
        assert s.reporter.sent["weights/updates"] == 4

    act(scenario)


def test_an_evaluation_keeps_its_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        s = Stage(tmp_path, [ticket(kind="eval")])
        s.engine.gate = asyncio.Event()
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: bool(s.engine.calls))
        s.subscriber.version = (0, 1)
        await asyncio.sleep(0.1)
        assert s.engine.held_version == (0, 0)
        s.engine.gate.set()
        await until(lambda: s.engine.held_version == (0, 1))
        assert [t.newest_version for t in s.buffer.stored] == [0]
        s.stop.set()
        await running

    act(scenario)


def test_under_drain_running_requests_finish_before_an_update(tmp_path: Path) -> None:
    async def scenario() -> None:
        s = Stage(tmp_path, [ticket()], drain=True)
        s.engine.gate = asyncio.Event()
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: bool(s.engine.calls))
        s.subscriber.version = (0, 1)
        await until(lambda: s.updates.loading)
        await asyncio.sleep(0.05)
        assert s.engine.held_version == (0, 0)
        s.engine.gate.set()
        await until(lambda: s.actor.tickets.counts.episodes == 1)
        s.stop.set()
        await running
        row = s.buffer.stored[0].rows[0]
        assert row.versions[row.mask].tolist() == [0, 0, 1, 1]

    act(scenario)


def test_an_evaluation_keeps_its_version_also_where_nothing_of_it_is_played(tmp_path: Path) -> None:
    """One slot, and a buffer that takes longer to answer than two looks for weights are apart."""

    async def scenario() -> None:
        s = Stage(tmp_path, [ticket(i, kind="eval") for i in range(4)], slots=1)
        lend = s.buffer.tickets

        async def slowly(*words: Any) -> Any:
            await asyncio.sleep(0.06)
            return await lend(*words)

        s.buffer.tickets = slowly  # type: ignore[method-assign]
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: len(s.buffer.stored) == 1)
        s.subscriber.version = (0, 1)
        await until(lambda: len(s.buffer.stored) == 4 and s.engine.held_version == (0, 1))
        s.stop.set()
        await running
        assert {(t.oldest_version, t.newest_version) for t in s.buffer.stored} == {(0, 0)}

    act(scenario)


def test_an_evaluation_that_begins_while_weights_are_read_keeps_its_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        s = Stage(tmp_path, [])
        read, reads, may_end = s.subscriber.open, threading.Event(), threading.Event()

        def slowly(verify: bool = True, version: Any = None) -> Any:
            reads.set()
            assert may_end.wait(DEADLINE_S)
            return read(verify, version)

        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: s.engine.held_version == (0, 0) and bool(s.buffer.credits))
        s.subscriber.open = slowly  # type: ignore[method-assign]
        s.engine.gate = asyncio.Event()
        s.subscriber.version = (0, 1)
        await until(reads.is_set)
        s.buffer.free.append(ticket(kind="eval"))
        await until(lambda: bool(s.engine.calls))
        may_end.set()
        await asyncio.sleep(0.1)
        s.engine.gate.set()
        await until(lambda: len(s.buffer.stored) == 1 and s.engine.held_version == (0, 1))
        s.stop.set()
        await running
        assert (s.buffer.stored[0].oldest_version, s.buffer.stored[0].newest_version) == (0, 0)

    act(scenario)


def test_a_player_goes_back_to_the_pinned_version_and_no_further_until_its_part_is_done(tmp_path: Path) -> None:
    async def scenario() -> None:
        s = Stage(tmp_path, [])
        s.subscriber.version = (0, 3)
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: s.engine.held_version == (0, 3) and bool(s.buffer.credits))
        s.subscriber.kept, s.buffer.hold = (0, 2), (0, 2)
        await until(lambda: s.engine.held_version == (0, 2))
        s.subscriber.version = (0, 4)
        s.buffer.free.append(ticket(kind="eval", min_version=(0, 2)))
        await until(lambda: len(s.buffer.stored) == 1)
        assert s.engine.held_version == (0, 2)
        assert (s.buffer.stored[0].oldest_version, s.buffer.stored[0].newest_version) == (2, 2)
        s.buffer.hold = None
        await until(lambda: s.engine.held_version == (0, 4))
        s.stop.set()
        await running

    act(scenario)


def test_a_player_goes_back_only_behind_the_episodes_that_need_a_later_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        s = Stage(tmp_path, [ticket(min_version=(0, 3))])
        s.subscriber.version = (0, 3)
        s.engine.gate = asyncio.Event()
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: bool(s.engine.calls))
        s.subscriber.kept, s.buffer.hold = (0, 2), (0, 2)
        await asyncio.sleep(0.15)
        assert s.engine.held_version == (0, 3)
        s.engine.gate.set()
        await until(lambda: s.engine.held_version == (0, 2))
        assert [(t.oldest_version, t.newest_version) for t in s.buffer.stored] == [(3, 3)]
        s.stop.set()
        await running

    act(scenario)


def test_a_ticket_that_met_newer_weights_on_its_way_is_played_with_the_pinned_ones(tmp_path: Path) -> None:
    """The actor loads version 1 while the buffer answers with a ticket pinned to version 0."""

    async def scenario() -> None:
        s = Stage(tmp_path, [])
        issue = s.buffer.tickets

        async def slowly(*words: Any) -> Any:
            reply = await issue(*words)
            if reply.tickets:
                s.subscriber.version, s.subscriber.kept = (0, 1), (0, 0)
                await until(lambda: s.engine.held_version == (0, 1))
            return reply

        s.buffer.tickets = slowly  # type: ignore[method-assign]
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: bool(s.buffer.credits))
        s.buffer.free.append(ticket(kind="eval"))
        await until(lambda: len(s.buffer.stored) == 1)
        assert (s.buffer.stored[0].oldest_version, s.buffer.stored[0].newest_version) == (0, 0)
        s.stop.set()
        await running

    act(scenario)
