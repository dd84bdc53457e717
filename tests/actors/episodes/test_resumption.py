"""A first turn that one actor began and another ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
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
from asyncrl.trajectory import Trajectory
from asyncrl.trajectory.kept_ids import KeptIds, kept_ids
from asyncrl.trajectory.turns import RecordedSample, ids_digest
from tests.actors.actor_stage import Stage, act, until
from tests.actors.episodes.recorded.recordings import Recorder
from tests.actors.fakes import SAID, STOP, CutEngine, FakeEngine, FakeEnv, FakeRenderer, ticket, tool_says


def begun(prompt: Sequence[int], said: Sequence[int], version: int = 0) -> RecordedSample:
    """What an interrupted first turn has left."""
    logprobs = np.full(len(said), -0.25, np.float32)
    versions = np.full(len(said), version, np.int32)
    return RecordedSample(0, np.array(said, np.int32), logprobs, versions, "abort", ids_digest(list(prompt)))


PROMPT = FakeRenderer().render_initial([{"role": "system", "content": "Hello"}], [])
LIMITS = EpisodeLimits(max_turns=4, max_tokens=1000, max_new_tokens=10, call_s=5.0)


def played(
    before: RecordedSample, progress: Progress | None = None, engine: FakeEngine | None = None, limits: Any = LIMITS
) -> tuple[Trajectory, FakeEngine]:
    engine = engine or FakeEngine(lambda _, prompt, __: SAID[2:] if prompt[-1] == 66 else [90, STOP])
    engine.held_version = (0, 3)
    turns = [tool_says("1"), Turn(reward=1.0, done=True)]
    again = replace(ticket(), durable=True, turns=(before,))
    progress = progress or Progress(0.0)
    progress.keep = Recorder().keep
    env = FakeEnv(turns)
    result = asyncio.run(play(again, lambda: env, engine, FakeRenderer(), limits, progress))
    return result.trajectory(again, progress, actor="b", env_name="lookup"), engine


def test_the_turn_goes_on_behind_what_was_sampled() -> None:
    progress = Progress(0.0)
    trajectory, engine = played(begun(PROMPT, SAID[:2], version=1), progress)
    (row,) = trajectory.rows
    turn = slice(len(PROMPT), len(PROMPT) + 5)
    assert row.token_ids[turn].tolist() == SAID
    assert row.versions[turn].tolist() == [1, 1, 3, 3, 3]
    assert row.logprobs[turn][:2].tolist() == [-0.25, -0.25]
    assert row.mask[turn].all()
    assert trajectory.turns == 2
    assert engine.calls[0][1] == PROMPT + SAID[:2]
    assert engine.calls[0][2].max_new_tokens == 8
    assert engine.calls[1][2].max_new_tokens == 10
    assert progress.tokens == trajectory.num_policy_tokens
    assert [turn.sampled for turn in trajectory.turn_records] == [5, 2]
    assert trajectory.turn_records[0].prefilled == len(PROMPT) + 2


@pytest.mark.parametrize(
    "before",
    [
        begun([*PROMPT, 1], SAID[:2]),  # the environment begins otherwise now
        begun(PROMPT, [65] * 10),  # no room for one more
        begun(PROMPT, [65, STOP, 66]),  # the run stops at other tokens now
    ],
)
def test_a_turn_that_does_not_fit_is_left(before: RecordedSample) -> None:
    progress = Progress(0.0)
    _, engine = played(before, progress)
    assert engine.calls[0][1] == PROMPT
    assert progress.begun_again == 1


def test_a_resumed_turn_that_is_given_up_is_no_waste_below_zero(tmp_path: Path) -> None:
    async def scenario() -> None:
        again = replace(ticket(), durable=True, turns=(begun(PROMPT, SAID[:2]),))
        s = Stage(tmp_path, [again], engine=CutEngine(2), idle_s=0.05)
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
        progress.keep = Recorder().keep
        of = replace(ticket(), durable=True)
        playing = asyncio.ensure_future(play(of, lambda: FakeEnv([]), engine, FakeRenderer(), LIMITS, progress))
        await until(lambda: bool(progress.interruptible) and bool(engine.running))
        await engine.abort(progress.interruptible)
        with pytest.raises(Exception, match="aborted") as raised:
            await playing
        assert not isinstance(raised.value, Interrupted)

    act(scenario)


class KeepingEngine(FakeEngine):
    """Gives kept ids where they are asked for: of each token itself and the next id."""

    async def generate(self, request: str, prompt: Sequence[int], sampling: Sampling) -> Generation:
        made = await super().generate(request, prompt, sampling)
        sets = [[token, token + 1] for token in made.token_ids.tolist()]
        return replace(made, kept=kept_ids(sets, sampling.max_kept) if sampling.max_kept else None)


KEPT = kept_ids([[token, token + 1, token + 2] for token in SAID[:2]], 3)


@pytest.mark.parametrize(
    ("max_kept", "kept", "continued"),
    [(8, KEPT, True), (3, KEPT, True), (2, KEPT, False), (8, None, False), (0, KEPT, False), (0, None, True)],
    ids=["kept", "just-within", "more-than-recorded-now", "whole-before", "whole-now", "whole"],
)
def test_a_turn_is_continued_if_it_was_sampled_as_the_rest_will_be(
    max_kept: int, kept: KeptIds | None, continued: bool
) -> None:
    before = replace(begun(PROMPT, SAID[:2], version=1), kept=kept)
    limits = replace(LIMITS, top_p=0.9 if max_kept else 1.0, max_kept=max_kept)
    engine = KeepingEngine(lambda _, prompt, __: SAID[2:] if prompt[-1] == 66 else [90, STOP])
    trajectory, _ = played(before, engine=engine, limits=limits)
    (row,) = trajectory.rows
    assert (engine.calls[0][1] != PROMPT) is continued
    assert (int(row.versions[len(PROMPT)]) == 1) is continued
    assert (row.kept is not None) is (max_kept > 0)
    assert row.kept is None or row.kept.problem(row.token_ids[row.mask]) == ""
