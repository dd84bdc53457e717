"""Episodes of a group are compared before any of them is put; what goes wrong there fails all of them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.actors.envs.protocol import Turn
from asyncrl.actors.episodes.environment_calls import EpisodeFailed
from asyncrl.actors.episodes.group_scores import GroupScores
from asyncrl.actors.episodes.progress import Progress
from asyncrl.actors.player import player
from asyncrl.config import Config
from asyncrl.rewards.group_score import GroupAnswer
from asyncrl.trajectory import Trajectory
from asyncrl.trajectory.turns import NOT_SCORED
from tests.actors.actor_stage import Stage, act, until
from tests.actors.episodes.recorded.recordings import Recorder
from tests.actors.fakes import STOP, FakeEngine, FakeEnv, FakeRenderer, ticket, tool_says

SIZE = 4
"""Of the groups of `fakes.ticket`."""


class TwoTurns(FakeEnv):
    def __init__(self) -> None:
        super().__init__([tool_says("well?"), Turn(reward=0.5, done=True, rewards={"own": 0.5})])


async def longest(task: Any, answers: Sequence[GroupAnswer], points: float = 1.0) -> list[float]:
    assert [m["role"] for m in answers[0].messages] == ["system", "assistant", "tool", "assistant"]
    assert answers[0].rewards == {"own": 0.5}
    most = max(len(a.text) for a in answers)
    return [points * (len(a.text) == most) for a in answers]


def too_few(task: Any, answers: Sequence[GroupAnswer]) -> list[float]:
    return [0.0]


def raises(task: Any, answers: Sequence[GroupAnswer]) -> list[float]:
    raise ConnectionError("the judge is away")


def too_large(task: Any, answers: Sequence[GroupAnswer]) -> list[float]:
    return [2e6] * len(answers)


def of_too_many_digits(task: Any, answers: Sequence[GroupAnswer]) -> list[int]:
    return [10**400] * len(answers)


def interrupts(task: Any, answers: Sequence[GroupAnswer]) -> list[float]:
    raise KeyboardInterrupt


def not_finite(task: Any, answers: Sequence[GroupAnswer]) -> list[float]:
    return [float("nan")] * len(answers)


async def hangs(task: Any, answers: Sequence[GroupAnswer]) -> list[float]:
    await asyncio.sleep(100)
    return []


def exits(task: Any, answers: Sequence[GroupAnswer]) -> list[float]:
    sys.exit(3)


async def cancelled(task: Any, answers: Sequence[GroupAnswer]) -> list[float]:
    raise asyncio.CancelledError


def played(score: str, *tickets: Any, give_up: int | None = None, later: Sequence[Any] = (), **env: Any) -> list[Any]:
    """The ends of the tickets' episodes; that of `give_up` is cancelled as it waits, and `later` ones are played."""
    config = Config.model_validate({
        "env": {"name": f"{__name__}:TwoTurns", "group_score": f"{__name__}:{score}", "call_s": 0.5, **env},
        "actors": {"episode_s": 1.0},
    })  # fmt: skip

    async def scenario() -> list[Any]:
        # Episode i says i + 1 letters.
        engine: Any = FakeEngine(lambda request, *_: [65] * (int(request.split("-")[0].split(".")[2]) + 1) + [STOP])
        async with player(config, engine, FakeRenderer(), actor="actor-0") as play:
            playing = [asyncio.ensure_future(play(t, Progress(time.monotonic()))) for t in tickets]
            if give_up is not None:
                await asyncio.sleep(0.05)
                playing[give_up].cancel()
                playing += [asyncio.ensure_future(play(t, Progress(time.monotonic()))) for t in later]
            return await asyncio.gather(*playing, return_exceptions=True)

    return asyncio.run(asyncio.wait_for(scenario(), 20))


def rewards(ends: Sequence[Any]) -> list[float]:
    assert all(isinstance(end, Trajectory) for end in ends), ends
    return [end.reward for end in ends]


def test_each_episode_gets_its_part_and_only_of_its_own_group() -> None:
    tickets = [ticket(i, group=g) for i in range(SIZE) for g in (1, 2)]
    ends = played("longest", *tickets, group_score_options={"points": 2.0}, group_score_weight=0.25)
    assert rewards(ends) == [0.5] * 6 + [1.0] * 2
    assert [end.rewards for end in ends[:1] + ends[-1:]] == [{"own": 0.5, "group": 0.0}, {"own": 0.5, "group": 2.0}]
    assert len({end.digest() for end in ends}) == 8
    assert [turn.reward for turn in ends[-1].turn_rewards] == [0.0, 1.0]
    assert ends[-1].turn_rewards[-1].rewards == {"own": 0.5, "group": 2.0}


def test_an_episode_that_is_given_up_while_it_waits_comes_back_as_another_attempt() -> None:
    three = [ticket(i) for i in range(SIZE - 1)]
    ends = played("longest", *three, give_up=1, later=[three[1], ticket(3)])
    assert isinstance(ends.pop(1), asyncio.CancelledError)
    assert rewards(ends) == [0.5, 0.5, 0.5, 1.5]
    for later in ([], [ticket(3)]):  # what was given up is no part of the group, also when that would make it whole
        ends = played("longest", *three, give_up=1, later=later)
        assert isinstance(ends.pop(1), asyncio.CancelledError)
        assert all(isinstance(end, EpisodeFailed) and "not complete within 1 s" in str(end) for end in ends)


@pytest.mark.parametrize(
    ("score", "said"),
    [
        ("too_few", "ValueError: group score too_few returned 1 numbers for 4 answers"),
        ("raises", "ConnectionError: the judge is away"),
        ("not_finite", "expected finite numbers"),
        ("too_large", "group score too_large: a reward of 2e+06, and env.max_reward is 1e+06"),
        ("of_too_many_digits", "OverflowError"),
        ("interrupts", "it raised KeyboardInterrupt"),
        ("exits", "it called sys.exit(3)"),
        ("cancelled", "group score cancelled: CancelledError"),
        ("hangs", r"did not return within 0.5 s (env.call_s)"),
    ],
)
def test_a_score_that_fails_is_an_outage_for_the_whole_group(score: str, said: str) -> None:
    ends = played(score, *[ticket(i) for i in range(SIZE)])
    assert all(isinstance(end, EpisodeFailed) and end.reason == NOT_SCORED and end.cause for end in ends)
    assert all(said in str(end) for end in ends)


class Again(TwoTurns):
    replayable = True


def test_a_group_whose_actor_is_lost_goes_on_at_its_turns_and_is_compared_on_another() -> None:
    """Two of its episodes were over, one had begun, one had not."""
    config = Config.model_validate({
        "env": {"name": f"{__name__}:Again", "group_score": f"{__name__}:longest"}, "buffer": {"turns": "on"},
    })  # fmt: skip
    recorders = [Recorder() for _ in range(SIZE)]

    def says(request: str, *_: Any) -> list[int]:
        return [65 + int(request[-1])] * (int(request.split("-")[0].split(".")[2]) + 1) + [STOP]

    async def playing(carried: Sequence[int], count: int) -> tuple[list[Any], FakeEngine]:
        """`carried`: records of each episode. Ends of the first `count`; those that wait for others are cancelled."""
        engine: Any = FakeEngine(says)
        async with player(config, engine, FakeRenderer(), actor="actor-0") as play:
            tickets = [replace(ticket(i), durable=True, turns=recorders[i].carried(n)) for i, n in enumerate(carried)]
            progress = [Progress(time.monotonic(), keep=recorder.keep) for recorder in recorders]
            tasks = [asyncio.ensure_future(play(*each)) for each in zip(tickets[:count], progress, strict=False)]
            if count < SIZE:
                await until(lambda: all(each.phase == "put" for each in progress[:count]))
                for task in tasks:
                    task.cancel()
            return await asyncio.gather(*tasks, return_exceptions=True), engine

    async def scenario() -> None:
        ends, _ = await playing([0] * SIZE, 3)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends)
        forms = ["reset", "sample", "answer", "sample"]
        assert [[record.form for record in each.records] for each in recorders] == [forms] * 3 + [[]]
        ends, engine = await playing([4, 4, 2, 0], SIZE)
        assert rewards(ends) == [0.5, 0.5, 0.5, 1.5]
        assert [end.turns for end in ends] == [2] * SIZE
        assert len(engine.calls) == 1 + 2, "the rest of the third episode, and the fourth"

    act(scenario)


def test_an_episode_that_waits_for_its_group_takes_up_no_slot(tmp_path: Path) -> None:
    """Two slots, groups of four: if it did, nothing would ever end."""

    async def numbered(task: Any, answers: Sequence[GroupAnswer]) -> list[float]:
        return [float(place) for place, _ in enumerate(answers)]

    async def scenario() -> None:
        groups = GroupScores(numbered, 1.0, 5.0, 10.0)
        s = Stage(
            tmp_path, [ticket(i, group=g) for g in (1, 2) for i in range(SIZE)], slots=2, compared=groups.compared
        )
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: s.actor.tickets.counts.episodes == 2 * SIZE)
        s.stop.set()
        await running
        assert max(s.buffer.credits) == 2
        assert sorted(t.reward for t in s.buffer.stored) == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]
        assert len(s.acknowledged()) == 2 * SIZE

    act(scenario)


def test_evaluation_is_of_single_episodes() -> None:
    assert rewards(played("longest", ticket(0, kind="eval"))) == [0.5]
