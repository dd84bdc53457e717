"""An actor that is stopped: episodes finish, tickets are released, interrupted turns of durable ones are recorded."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.actors.envs.protocol import Turn
from asyncrl.trajectory import Ticket
from asyncrl.trajectory.turns import RecordedSample, ids_digest
from tests.actors.actor_stage import Stage, act, until
from tests.actors.fakes import SAID, CutEngine, FakeEngine, FakeEnv, FakeRenderer, ticket


def durable(index: int) -> Ticket:
    return replace(ticket(index), durable=True)


def test_told_to_stop_it_drains_then_gives_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        class Slow(FakeEnv):
            async def step(self, message: Any) -> Turn:
                await (s.stop.wait() if self.task["episode"] == 0 else asyncio.sleep(60))
                return Turn(done=True)

        s = Stage(tmp_path, [ticket(0), ticket(1)], env=lambda: Slow([]), drain_s=1.5)
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: len(s.engine.said) == 4)
        s.buffer.free.append(ticket(2))
        s.buffer.free.append(ticket(3))
        s.buffer.free.append(ticket(4))
        s.stop.set()
        await running
        assert [t.id.index for t in s.buffer.stored] == [0]
        released = {lease[0].index for lease in s.buffer.released}
        assert 1 in released
        lent = {2, 3, 4} - {t.id.index for t in s.buffer.free}
        assert released == {1} | lent, "a ticket that arrived while stopping is given back, too"
        assert all(env.closed == 1 for env in s.envs)

    act(scenario)


def test_told_to_stop_it_hands_over_what_was_sampled_in_first_turns(tmp_path: Path) -> None:
    """Also where the environment could not continue behind a step."""

    async def scenario() -> None:
        s = Stage(tmp_path, [durable(i) for i in range(3)], drain_s=0.2, engine=CutEngine(2))
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: len(s.engine.running) == 3)
        s.stop.set()
        await running
        assert sorted(lease[0].index for lease in s.buffer.released) == [0, 1, 2]
        assert sorted(id.index for id, _, _ in s.buffer.turns) == [0, 1, 2]
        prompt = FakeRenderer().render_initial([{"role": "system", "content": "Hello"}], [])
        for _, _, record in s.buffer.turns:
            assert isinstance(record, RecordedSample)
            assert (record.partial, record.prompt, record.token_ids.tolist()) == (True, ids_digest(prompt), SAID[:2])
        assert s.buffer.failed == []
        assert s.reporter.sent["throughput/tokens_wasted/aborted"] == 0
        assert all(env.closed == 1 and env.heard == [] for env in s.envs)

    act(scenario)


@pytest.mark.parametrize(("ticket", "said"), [(durable(0), 0), (ticket(0), 2)], ids=["no token", "not durable"])
def test_without_a_token_or_without_durable_turns_tickets_go_back_bare(
    tmp_path: Path, ticket: Ticket, said: int
) -> None:
    async def scenario() -> None:
        s = Stage(tmp_path, [ticket], drain_s=0.1, engine=CutEngine(said))
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: bool(s.engine.running))
        s.stop.set()
        await running
        assert [lease[0].index for lease in s.buffer.released] == [0]
        assert s.buffer.turns == []

    act(scenario)


def test_a_first_turn_that_was_stepped_is_not_handed_over_where_the_environment_cannot_continue(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(lambda *_: SAID)

        class Slow(FakeEnv):
            async def step(self, message: Any) -> Turn:
                await asyncio.sleep(60)
                return Turn(done=True)

        s = Stage(tmp_path, [durable(0)], drain_s=0.1, engine=engine, env=lambda: Slow([]))
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: bool(engine.said))
        s.stop.set()
        await running
        assert ([lease[0].index for lease in s.buffer.released], s.buffer.turns) == ([0], [])

    act(scenario)


def test_an_engine_that_does_not_answer_holds_up_no_actor_that_leaves(tmp_path: Path) -> None:
    class Deaf(CutEngine):
        async def abort(self, request: str) -> None:
            await asyncio.sleep(600)

    async def scenario() -> None:
        s = Stage(tmp_path, [durable(0)], drain_s=0.2, engine=Deaf(2))
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: bool(s.engine.running))
        s.stop.set()
        await running
        assert ([lease[0].index for lease in s.buffer.released], s.buffer.turns) == ([0], [])

    act(scenario)


def test_an_episode_that_ends_while_others_are_interrupted_is_put(tmp_path: Path) -> None:
    """Before, its put was cancelled: it was neither acknowledged nor released, and its lease lapsed."""

    async def scenario() -> None:
        aborting = asyncio.Event()

        class Slow(CutEngine):
            async def generate(self, request: str, prompt: Any, sampling: Any) -> Any:
                generate = super().generate if not self.running else super(CutEngine, self).generate
                return await generate(request, prompt, sampling)

            async def abort(self, request: str) -> None:
                aborting.set()
                await asyncio.sleep(0.1)
                await super().abort(request)

        class Ends(FakeEnv):
            async def step(self, message: Any) -> Turn:
                await aborting.wait()
                return Turn(done=True)

        s = Stage(tmp_path, [durable(0), durable(1)], drain_s=1.0, engine=Slow(2), env=lambda: Ends([]))
        put = s.buffer.put

        async def slow_put(trajectory: Any) -> Any:
            await asyncio.sleep(0.5)  # it is under way when the interruption is over
            return await put(trajectory)

        s.buffer.put = slow_put  # type: ignore[method-assign]
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: bool(s.engine.said))
        s.stop.set()
        await running
        assert [line["group"] for line in s.acknowledged()] == [0]
        assert ([t.id.index for t in s.buffer.stored], [lease[0].index for lease in s.buffer.released]) == ([1], [0])

    act(scenario)
