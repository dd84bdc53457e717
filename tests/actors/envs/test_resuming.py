"""How environments declare that an interrupted episode can go on, wherever they run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.actors.envs.adapters.mcp import McpToolEnv
from asyncrl.actors.envs.adapters.text_gym import TextGymEnv
from asyncrl.actors.envs.calculator import CalculatorEnv
from asyncrl.actors.envs.lookup import LookupEnv
from asyncrl.actors.envs.mix import MixEnv
from asyncrl.actors.envs.protocol import EnvFailed
from asyncrl.actors.envs.resuming import told, way_of
from asyncrl.actors.envs.tool_env import ToolEnvironment
from asyncrl.actors.episodes.environment_calls import EpisodeFailed, GuardedEnv
from asyncrl.actors.episodes.progress import Progress
from asyncrl.actors.player import player
from asyncrl.config import Config
from asyncrl.trajectory import Trajectory
from asyncrl.trajectory.turns import Recorded, RecordedAnswer
from tests.actors.envs.resuming_envs import Plain, Told
from tests.actors.episodes.recorded.counters import Snapshots
from tests.actors.episodes.recorded.recordings import PureEngine, Recorder
from tests.actors.fakes import FakeRenderer, ticket

HERE = "tests.actors.envs.test_resuming"
HOSTED = "tests.actors.envs.resuming_envs"


class Forgetful(Plain):
    async def snapshot(self) -> bytes:
        return b""


class Half(Snapshots):
    restore = None  # type: ignore[assignment]


class Doing(ToolEnvironment):
    """Keeps what its tools did."""

    state_fields = ("done_so_far",)

    def __init__(self) -> None:
        super().__init__((self.do,), score="exact_match")
        self.done_so_far: list[str] = []

    async def do(self, what: str) -> str:
        """Do it."""
        self.done_so_far.append(what)
        return f"done: {len(self.done_so_far)}"


class Derived(Doing):
    """Says nothing of what it keeps itself."""


def test_what_an_environment_declares() -> None:
    assert way_of(Plain()) == "none"
    assert way_of(Told()) == "told"
    assert way_of(Snapshots()) == "snapshot"
    assert way_of(type("Again", (Plain,), {"replayable": True})()) == "replay"
    assert [way_of(env) for env in (Doing(), Derived(), ToolEnvironment())] == ["snapshot", "none", "snapshot"]
    assert [way_of(env) for env in (CalculatorEnv(), LookupEnv())] == ["snapshot", "snapshot"]
    assert way_of(type("Mine", (CalculatorEnv,), {})()) == "none", "its own state is not known"
    assert [way_of(TextGymEnv("gem", "g", replayable=known)) for known in (False, True)] == ["none", "replay"]
    mcp = [McpToolEnv([], "exact_match", per_episode=own, replayable=known) for own, known in ((0, 0), (1, 0), (1, 1))]
    assert [way_of(env) for env in mcp] == ["snapshot", "none", "replay"]


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (Forgetful(), "it has snapshot and no restore"),
        (type("Half", (Plain,), {"restore": Snapshots.restore})(), "it has restore and no snapshot"),
        (type("Odd", (Plain,), {"replayable": "yes"})(), "replayable is 'yes', expected True or False"),
        (type("Odder", (Plain,), {"resumed_by": "magic"})(), "resumed_by is 'magic', expected one of snapshot"),
    ],
)
def test_what_cannot_be_declared_says_so(env: Any, words: str) -> None:
    with pytest.raises(EnvFailed, match=words):
        way_of(env)
    with pytest.raises(EpisodeFailed, match=words):
        _ = GuardedEnv(lambda: env, 1.0, 1e6).way


@pytest.mark.parametrize(
    ("state", "words"),
    [(7, "it gave a int"), ("\ud800", "a text that is no Unicode"), ("ü" * 6, "it gave 12 bytes, at most 10")],
)
def test_a_snapshot_is_checked(state: Any, words: str) -> None:
    class Odd(Snapshots):
        async def snapshot(self) -> Any:
            return state

    with pytest.raises(EpisodeFailed, match=words):
        asyncio.run(GuardedEnv(Odd, 1.0, 1e6).snapshot(10))


def test_only_who_wants_to_know_is_told() -> None:
    message = {"role": "assistant", "content": "pay"}
    assert told(Told(), message) == {"interrupted": message}
    assert told(Told(), None) == told(Plain(), message) == told(Snapshots(), message) == {}


def test_a_tool_environment_goes_on_with_its_turns_and_fields() -> None:
    async def scenario() -> None:
        first, second = Doing(), Doing()
        call = {"id": "1", "function": {"name": "do", "arguments": '{"what": "a"}'}}
        for env in (first, second):
            await env.reset({"id": "t", "prompt": "p", "ground_truth": "x"})
        await first.step({"role": "assistant", "content": "", "tool_calls": [call]})
        await second.restore(await first.snapshot())
        assert second.done_so_far == ["a"]
        turn = await second.step({"role": "assistant", "content": "x"})
        assert (turn.reward, turn.metrics["turns"]) == (1.0, 2.0)

    asyncio.run(scenario())


def test_a_tool_environment_says_what_it_cannot_pack() -> None:
    env = Doing()
    env.done_so_far = [object()]  # type: ignore[list-item]
    with pytest.raises(EpisodeFailed, match=r"environment\.snapshot"):
        asyncio.run(GuardedEnv(lambda: env, 1.0, 1e6).snapshot(10))


def played(workers: str, recorder: Recorder, carried: Sequence[Recorded] = (), name: str = "Six") -> tuple[
    Trajectory, PureEngine
]:  # fmt: skip
    env = {"name": f"{HOSTED}:{name}", "workers": workers, "worker_count": 2, "call_s": 30.0, "max_turns": 9}
    config = Config.model_validate({"env": env, "actors": {"max_new_tokens": 10}})

    async def episode() -> tuple[Trajectory, PureEngine]:
        engine: Any = PureEngine()
        async with player(config, engine, FakeRenderer(), actor="actor-0") as play:
            begun = replace(ticket(), durable=True, turns=tuple(carried))
            return await asyncio.wait_for(play(begun, Progress(0.0, keep=recorder.keep)), 60), engine

    return asyncio.run(episode())


@pytest.mark.parametrize("workers", ["async", "threads", "processes"])
def test_an_episode_goes_on_wherever_its_environment_runs(workers: str) -> None:
    whole, rest = Recorder(), Recorder()
    undisturbed, _ = played(workers, whole)
    assert [r.snapshot is not None for r in whole.records if isinstance(r, RecordedAnswer)] == [True, True]
    resumed, engine = played(workers, rest, whole.carried(3))
    assert resumed.digest() == undisturbed.digest()
    assert len(engine.said) == 8, "two of three turns are sampled"
    assert len(whole.records) == 3 + len(rest.records)


@pytest.mark.parametrize("workers", ["async", "threads"])
def test_half_a_pair_of_methods_is_asked_about_only_where_turns_are_durable(workers: str) -> None:
    env = {"name": f"{HERE}:Half", "workers": workers, "worker_count": 1, "call_s": 30.0, "max_turns": 9}
    config = Config.model_validate({"env": env, "actors": {"max_new_tokens": 10}})

    async def episode(durable: bool) -> Trajectory:
        engine: Any = PureEngine()
        keep = Recorder().keep if durable else None
        async with player(config, engine, FakeRenderer(), actor="actor-0") as play:
            return await asyncio.wait_for(play(replace(ticket(), durable=durable), Progress(0.0, keep=keep)), 60)

    assert asyncio.run(episode(False)).turns == 6
    with pytest.raises(EpisodeFailed, match="it has snapshot and no restore"):
        asyncio.run(episode(True))


@pytest.mark.parametrize("workers", ["async", "processes"])
def test_who_wants_to_know_is_told_wherever_it_runs(workers: str) -> None:
    first = Recorder()
    played(workers, first, name="Told")
    begun, again = first.records[0], Recorder()
    played(workers, again, first.carried(2), name="Told")
    told_at_first, told_now = (records[0].messages[0]["content"] for records in ([begun], again.records))  # type: ignore[attr-defined]
    assert told_at_first == "interrupted: None"
    assert told_now != told_at_first


def test_a_mix_goes_on_as_the_environment_of_its_task_does() -> None:
    async def scenario() -> None:
        envs = {name: {"name": f"{HOSTED}:{cls}"} for name, cls in (("six", "Six"), ("plain", "Plain"))}
        first, second = MixEnv(envs), MixEnv(envs)
        for env in (first, second):
            await env.reset({"id": "t", "prompt": "p", "env": "six"})
        await first.step({"role": "assistant", "content": "a"})
        await second.restore(await first.snapshot())  # type: ignore[arg-type]
        assert (await second.step({"role": "assistant", "content": "b"})).metrics == {"heard": 2}
        assert first.resumed_by == "snapshot"
        plain = MixEnv(envs)
        await plain.reset({"id": "t", "prompt": "p", "env": "plain"})
        assert plain.resumed_by == "none"

    asyncio.run(scenario())
