"""A first turn that one actor began and another ends."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.actors.engines.protocol import Generation, Sampling
from asyncrl.actors.envs.protocol import Turn
from asyncrl.actors.episodes.episode import play
from asyncrl.actors.episodes.progress import EpisodeLimits, Progress
from asyncrl.actors.episodes.resumption import Interrupted
from asyncrl.trajectory import CONTEXT, Row, Trajectory
from tests.actors.actor_stage import Stage, act, until
from tests.actors.fakes import STOP, FakeEngine, FakeEnv, FakeRenderer, ticket, tool_says

SAID = [65, 66, 67, 68, STOP]


class CutEngine(FakeEngine):
    """Has said the first `said` tokens of an answer when it is aborted."""

    def __init__(self, said: int) -> None:
        super().__init__(lambda *_: SAID)
        self._cut = said
        self.running: dict[str, asyncio.Event] = {}

    async def generate(self, request: str, prompt: Any, sampling: Sampling) -> Generation:
        self.running[request] = asyncio.Event()
        await self.running[request].wait()
        whole = await super().generate(request, prompt, sampling)
        n = self._cut
        return Generation(whole.token_ids[:n], whole.logprobs[:n], whole.versions[:n], "abort")

    async def abort(self, request: str) -> None:
        self.running[request].set()


def prefix_of(prompt: list[int], said: list[int], version: int = 0) -> Row:
    n, m = len(prompt), len(said)
    return Row(
        np.array(prompt + said, np.int32),
        np.array([False] * n + [True] * m),
        np.array([0.0] * n + [-0.25] * m, np.float32),
        np.array([CONTEXT] * n + [version] * m, np.int32),
    )


PROMPT = FakeRenderer().render_initial([{"role": "system", "content": "Hello"}], [])
LIMITS = EpisodeLimits(max_turns=4, max_tokens=1000, max_new_tokens=10, call_s=5.0)


def played(prefix: Row | None, progress: Progress | None = None) -> tuple[Trajectory, FakeEngine]:
    engine = FakeEngine(lambda _, prompt, __: SAID[2:] if prompt[-1] == 66 else [90, STOP])
    engine.held_version = (0, 3)
    turns = [tool_says("1"), Turn(reward=1.0, done=True)]
    begun = replace(ticket(), prefix=prefix)
    progress = progress or Progress(0.0)
    env = FakeEnv(turns)
    result = asyncio.run(play(begun, lambda: env, engine, FakeRenderer(), LIMITS, progress))
    return result.trajectory(begun, progress, actor="b", env_name="lookup"), engine


def test_the_turn_goes_on_behind_what_was_sampled() -> None:
    progress = Progress(0.0)
    trajectory, engine = played(prefix_of(PROMPT, SAID[:2], version=1), progress)
    (row,) = trajectory.rows
    assert row.begins_with(prefix_of(PROMPT, SAID[:2], version=1))
    turn = slice(len(PROMPT), len(PROMPT) + 5)
    assert row.token_ids[turn].tolist() == SAID
    assert row.versions[turn].tolist() == [1, 1, 3, 3, 3]
    assert row.logprobs[turn][:2].tolist() == [-0.25, -0.25]
    assert row.mask[turn].all()
    assert trajectory.turns == 2
    assert engine.calls[0][1] == PROMPT + SAID[:2]
    assert engine.calls[0][2].max_new_tokens == 8
    assert engine.calls[1][2].max_new_tokens == 10
    assert progress.prefix_tokens == 2
    assert progress.tokens == trajectory.num_policy_tokens


@pytest.mark.parametrize(
    "prefix",
    [
        prefix_of([*PROMPT, 1], SAID[:2]),  # the environment begins otherwise now
        prefix_of(PROMPT, [65] * 10),  # no room for one more
        prefix_of(PROMPT, [65, STOP, 66]),  # the run stops at other tokens now
    ],
)
def test_a_prefix_that_does_not_fit_is_left(prefix: Row) -> None:
    trajectory, engine = played(prefix)
    assert engine.calls[0][1] == PROMPT
    assert not trajectory.rows[0].begins_with(prefix)


def test_told_to_stop_it_hands_back_what_was_sampled_in_first_turns(tmp_path: Path) -> None:
    async def scenario() -> None:
        s = Stage(tmp_path, [ticket(i) for i in range(3)], resume=True, drain_s=0.2, engine=CutEngine(2))
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: len(s.engine.running) == 3)
        s.stop.set()
        await running
        assert sorted(lease[0].index for lease in s.buffer.released) == [0, 1, 2]
        for prefix in s.buffer.prefixes:
            assert prefix is not None
            assert prefix.token_ids.tolist() == PROMPT + SAID[:2]
            assert prefix.mask.tolist() == [False] * len(PROMPT) + [True] * 2
        assert s.buffer.failed == []
        assert s.reporter.sent["throughput/tokens_wasted/aborted"] == 0
        assert all(env.closed == 1 and env.heard == [] for env in s.envs)

    act(scenario)


@pytest.mark.parametrize(("resume", "said"), [(True, 0), (False, 2)])
def test_without_a_token_or_without_the_option_tickets_go_back_bare(tmp_path: Path, resume: bool, said: int) -> None:
    async def scenario() -> None:
        s = Stage(tmp_path, [ticket(0)], resume=resume, drain_s=0.1, engine=CutEngine(said))
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: bool(s.engine.running))
        s.stop.set()
        await running
        assert [lease[0].index for lease in s.buffer.released] == [0]
        assert s.buffer.prefixes in ([], [None])

    act(scenario)


def test_an_environment_that_was_stepped_is_not_handed_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(lambda *_: SAID)

        class Slow(FakeEnv):
            async def step(self, message: Any) -> Turn:
                await asyncio.sleep(60)
                return Turn(done=True)

        s = Stage(tmp_path, [ticket(0)], resume=True, drain_s=0.1, engine=engine, env=lambda: Slow([]))
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: bool(engine.said))
        s.stop.set()
        await running
        assert s.buffer.prefixes == [None]

    act(scenario)


def test_an_engine_that_does_not_answer_holds_up_no_actor_that_leaves(tmp_path: Path) -> None:
    class Deaf(CutEngine):
        async def abort(self, request: str) -> None:
            await asyncio.sleep(600)

    async def scenario() -> None:
        s = Stage(tmp_path, [ticket(0)], resume=True, drain_s=0.2, engine=Deaf(2))
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: bool(s.engine.running))
        s.stop.set()
        await running
        assert s.buffer.prefixes == [None]

    act(scenario)


def test_a_prefix_whose_turn_is_given_up_is_no_waste_below_zero(tmp_path: Path) -> None:
    async def scenario() -> None:
        begun = replace(ticket(), prefix=prefix_of(PROMPT, SAID[:2]))
        s = Stage(tmp_path, [begun], engine=CutEngine(2), idle_s=0.05)
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: bool(s.buffer.failed))
        assert s.actor.tickets.counts.aborted_tokens == 0
        s.stop.set()
        await running

    act(scenario)


def test_an_abort_that_nobody_here_asked_for_fails_the_episode() -> None:
    async def scenario() -> None:
        engine = CutEngine(2)
        progress = Progress(0.0)
        playing = asyncio.ensure_future(play(ticket(), lambda: FakeEnv([]), engine, FakeRenderer(), LIMITS, progress))
        await until(lambda: bool(progress.interruptible) and bool(engine.running))
        await engine.abort(progress.interruptible)
        with pytest.raises(Exception, match="aborted") as raised:
            await playing
        assert not isinstance(raised.value, Interrupted)

    act(scenario)
