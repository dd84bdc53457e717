"""Environments in threads and processes: they play the same episodes, and what they do to themselves stays theirs."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.actors.envs.hosting import pool
from asyncrl.actors.envs.protocol import Environment, Message, Turn
from asyncrl.actors.episodes.environment_calls import EpisodeFailed
from asyncrl.actors.episodes.progress import Progress
from asyncrl.actors.player import Play, for_held_out, player, players
from asyncrl.config import Config
from asyncrl.config.sections import EnvConfig
from asyncrl.errors import ConfigError
from asyncrl.trajectory import Trajectory
from tests.actors.fakes import STOP, FakeEngine, FakeRenderer, ticket
from tests.children import children

ENV = "tests.actors.envs.hosting.hosted_envs:HostedCounter"


def config(workers: str, count: int = 2, call_s: float = 20.0, name: str = ENV, **options: Any) -> Config:
    env = {"name": name, "options": options, "workers": workers, "worker_count": count, "call_s": call_s}
    return Config.model_validate({"env": env})


def stage(config: Config, scenario: Callable[[Play], Awaitable[Any]]) -> Any:
    async def played() -> Any:
        engine: Any = FakeEngine(lambda *_: [65, STOP])
        async with player(config, engine, FakeRenderer(), actor="actor-0") as play:
            return await asyncio.wait_for(scenario(play), 60)

    return asyncio.run(played())


async def one(play: Play, group: int = 0, **task: Any) -> Trajectory:
    return await play(ticket(group=group, **task), Progress(time.monotonic()))


@pytest.mark.parametrize("workers", ["async", "threads", "processes"])
@pytest.mark.system
def test_a_thousand_episodes_at_once_end_as_on_the_loop(workers: str) -> None:
    async def scenario(play: Play) -> list[Trajectory]:
        return list(await asyncio.gather(*(one(play, group=i) for i in range(1000))))

    found = stage(config(workers, turns=3), scenario)
    assert {(t.reward, t.turns, t.stop_reason) for t in found} == {(1.25, 3, "done")}
    assert [(turn.reward, turn.state) for turn in found[0].turn_rewards] == [
        (0.0, b"begin"),
        (0.25, b"\2"),
        (1.0, b"\1"),
    ]
    assert {t.task_id for t in found} == {f"task{i}" for i in range(1000)}
    assert len({t.digest() for t in found}) == 1000
    places = {(t.metrics["pid"], t.metrics["thread"]) for t in found}
    assert len(places) == (1 if workers == "async" else 2)
    assert ({pid for pid, _ in places} == {os.getpid()}) == (workers != "processes")


@pytest.mark.parametrize("workers", ["async", "threads", "processes"])
def test_what_blocks_in_a_worker_does_not_hold_up_the_loop(workers: str) -> None:
    """The loop that generates turns meanwhile; on it, it stands still for as long as the environment blocks."""
    blocks_s = 1.2

    async def scenario(play: Play) -> float:
        playing = asyncio.gather(*(one(play, group=i) for i in range(2)))
        worst, last = 0.0, time.monotonic()
        while not playing.done():
            await asyncio.sleep(0.001)
            worst, last = max(worst, time.monotonic() - last), time.monotonic()
        await playing
        return worst

    lag = stage(config(workers, blocks_s=blocks_s), scenario)
    assert (lag >= blocks_s) == (workers == "async"), lag


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_one_that_never_returns_misses_its_deadline_and_its_worker_is_replaced(workers: str) -> None:
    async def scenario(play: Play) -> None:
        with pytest.raises(EpisodeFailed, match=r"step did not return within 0.5 s \(env.call_s\)") as failed:
            await one(play, what="hang")
        assert failed.value.reason == "env_error"
        while True:  # meanwhile calls wait for the worker, and miss their own deadline
            (end,) = await asyncio.gather(one(play), return_exceptions=True)
            if isinstance(end, Trajectory):
                return
            assert isinstance(end, EpisodeFailed)
            assert end.reason == "env_error"

    stage(config(workers, count=1, call_s=0.5), scenario)


def test_a_worker_that_dies_costs_the_episodes_in_it_and_no_others() -> None:
    async def scenario(play: Play) -> None:
        here = children("envs.hosting")
        ends = await asyncio.gather(one(play, what="die"), one(play, group=1), return_exceptions=True)
        assert isinstance(ends[0], EpisodeFailed)
        assert ends[0].reason == "env_error"
        assert "its worker ended" in ends[0].detail
        assert isinstance(ends[1], Trajectory), "it lives in the other one"
        found = await asyncio.gather(*(one(play, group=i) for i in range(4)))
        assert len(found) == 4
        async with asyncio.timeout(50):
            while len(now := children("envs.hosting")) != 2 or now == here:  # noqa: ASYNC110 - another takes its place
                await asyncio.sleep(0.02)
        assert len(here) == 2

    stage(config("processes"), scenario)
    assert not children("envs.hosting")


@pytest.mark.parametrize("obstacle", ["file", "fork"])
def test_a_worker_whose_restarts_fail_is_restarted_until_one_does_not(
    obstacle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, it was gone for the rest of the run after one that failed: the user's file was just being saved, or the
    machine had no process left."""
    monkeypatch.setattr(pool, "RESTART_S", 0.02)
    good = f"from {ENV.partition(':')[0]} import HostedCounter"
    mine = tmp_path / "mine.py"
    mine.write_text(good)
    start = pool._process
    forbidden = False

    def starts(theirs: socket.socket) -> Callable[[], None]:
        if forbidden:
            theirs.close()
            raise BlockingIOError("Resource temporarily unavailable")
        return start(theirs)

    monkeypatch.setattr(pool, "_process", starts)

    async def scenario(play: Play) -> None:
        nonlocal forbidden
        assert (await one(play)).reward == 1.0
        mine.write_text(good if obstacle == "fork" else "def (:")
        forbidden = obstacle == "fork"
        assert isinstance((await asyncio.gather(one(play, what="die"), return_exceptions=True))[0], EpisodeFailed)
        while caplog.text.count("another is started") < 3:  # noqa: ASYNC110 - the first is the one that died
            await asyncio.sleep(0.01)
        mine.write_text(good)
        forbidden = False
        assert (await one(play)).reward == 1.0

    stage(config("processes", count=1, name=f"{mine}:HostedCounter"), scenario)
    assert ("Resource temporarily unavailable" in caplog.text) == (obstacle == "fork")
    assert not children("envs.hosting")


@pytest.mark.parametrize("workers", ["async", "threads", "processes"])
def test_what_it_raises_is_told_alike(workers: str) -> None:
    async def scenario(play: Play) -> None:
        with pytest.raises(EpisodeFailed) as failed:
            await one(play, what="raise")
        assert failed.value.detail.startswith("environment.step: ValueError: boom (")
        assert "hosted_envs.py, line " in failed.value.detail

    stage(config(workers, count=1), scenario)


@pytest.mark.parametrize("workers", ["async", "threads", "processes"])
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("half a pair", "environment.step: ValueError: no tool ? ("),
        ("half a pair at the exit", "it called sys.exit(?)"),
    ],
)
def test_half_a_surrogate_pair_in_an_error_is_a_question_mark(workers: str, what: str, told: str) -> None:
    """Before, a worker could not send such an answer, so that the call missed its deadline and counted as an outage."""

    async def scenario(play: Play) -> None:
        with pytest.raises(EpisodeFailed) as failed:
            await one(play, what=what)
        assert told in failed.value.detail
        assert failed.value.cause is not None
        assert not failed.value.cause.outage

    stage(config(workers, count=1, call_s=2.0), scenario)


@pytest.mark.parametrize("workers", ["async", "threads", "processes"])
@pytest.mark.parametrize("error", ["KeyboardInterrupt", "GeneratorExit", "SystemExit", "BaseException"])
def test_whatever_it_raises_costs_its_episode_only(workers: str, error: str) -> None:
    async def scenario(play: Play) -> None:
        ends = await asyncio.gather(
            one(play, what=f"raise {error}"), *(one(play, group=i) for i in range(1, 9)), return_exceptions=True
        )
        assert isinstance(ends[0], EpisodeFailed)
        assert error in ends[0].detail or "sys.exit" in ends[0].detail, ends[0]
        assert all(isinstance(end, Trajectory) for end in ends[1:]), "they live in the same one"

    stage(config(workers, count=1), scenario)


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_an_answer_of_more_bytes_than_a_worker_may_send_costs_its_episode_only(workers: str) -> None:
    async def scenario(play: Play) -> None:
        ends = await asyncio.gather(one(play, what="long"), one(play, group=1), return_exceptions=True)
        assert isinstance(ends[0], EpisodeFailed)
        assert "more than 33554432 bytes" in ends[0].detail
        assert isinstance(ends[1], Trajectory)

    stage(config(workers, count=1), scenario)


@pytest.mark.parametrize("garbage", [b"\xff" * 64, b"\0\0\0\x01\xc1", b"\0\0\0\x01\x2a", b"\0\0\0\x01\x80"])
def test_a_process_that_sends_garbage_is_replaced(garbage: bytes) -> None:
    async def scenario(play: Play) -> None:
        (end,) = await asyncio.gather(one(play, what="garbage", bytes=garbage), return_exceptions=True)
        assert isinstance(end, EpisodeFailed)
        assert end.reason == "env_error"
        assert "its worker ended" in end.detail
        assert (await one(play, group=1)).reward == 1.0

    stage(config("processes", count=1), scenario)


def test_what_cannot_be_hosted_is_refused() -> None:
    async def scenario(play: Play) -> None:
        raise AssertionError("it must not come this far")

    with pytest.raises(ConfigError, match=r"env.workers is threads and env.name .* an agent"):
        stage(config("threads", name=f"{__name__}:agent"), scenario)
    with pytest.raises(ConfigError, match=r"env.compact is 0.4 and env.name .* an agent: it keeps its own"):
        stage(Config(env=EnvConfig(name=f"{__name__}:agent", compact=0.4)), scenario)
    with pytest.raises(ConfigError, match=r"odd_agent': its replayable is 'yes', expected True or False"):
        stage(Config(env=EnvConfig(name=f"{__name__}:odd_agent")), scenario)


@pytest.mark.parametrize(("name", "said"), [("agent", True), ("called_again", False)])
def test_an_agent_whose_turns_are_not_recorded_is_named(name: str, said: bool, caplog: Any) -> None:
    async def scenario(play: Play) -> None:
        pass

    stage(Config.model_validate({"env": {"name": f"{__name__}:{name}"}, "buffer": {"turns": "on"}}), scenario)
    assert ("does not declare `replayable`" in caplog.text) == said


def test_a_held_out_set_with_an_agent_of_its_own_is_played_in_a_run_with_compaction_and_workers() -> None:
    """They are for environments, the run's own, as durable turns are."""
    sets = {name: {"env": f"{__name__}:{name}", "tasks": 1} for name in ("agent", "HeldOut")}
    env = EnvConfig(name=f"{__name__}:HeldOut", compact=0.4, max_tokens=1000, workers="threads")
    c = Config.model_validate({"env": env, "eval": {"sets": sets}, "buffer": {"turns": "on"}})

    engine: Any = FakeEngine(lambda *_: [65, STOP])

    async def scenario() -> None:
        async with players(c, engine, FakeRenderer(), actor="actor-0"):  # type: ignore[arg-type]
            pass

    asyncio.run(scenario())
    assert (for_held_out(c, "agent").env.compact, for_held_out(c, "agent").env.workers) == (0.0, "async")
    assert (for_held_out(c, "HeldOut").env.compact, for_held_out(c, "HeldOut").env.workers) == (0.4, "threads")


class HeldOut(Environment):
    async def reset(self, task: Any) -> list[Message]:
        return [{"role": "user", "content": "go"}]

    async def step(self, message: Message) -> Turn:
        return Turn(done=True)


async def agent(task: Any, client: Any) -> float:
    return 0.0


async def odd_agent(task: Any, client: Any) -> float:
    return 0.0


odd_agent.replayable = "yes"  # type: ignore[attr-defined]


async def called_again(task: Any, client: Any) -> float:
    return 0.0


called_again.replayable = True  # type: ignore[attr-defined]
