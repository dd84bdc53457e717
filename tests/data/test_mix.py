"""A mix keeps its weights, loses no task and repeats none; each task is played where it belongs."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from asyncrl.actors.envs.mix import MixEnv
from asyncrl.actors.episodes.progress import Progress
from asyncrl.actors.player import player
from asyncrl.buffer.tasks.sources import open_source
from asyncrl.config import Config
from asyncrl.data.group_sizes import GroupSizes
from asyncrl.data.mix import CYCLE, MixSource
from asyncrl.errors import ConfigError
from tests.actors.fakes import STOP, FakeEngine, FakeEnv, FakeRenderer, ticket


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for name, count in (("a", 5), ("b", 3)):
        rows = [{"prompt": f"{name}{i}", "ground_truth": "yes", "id": str(i)} for i in range(count)]
        (tmp_path / name).write_text("\n".join(json.dumps(row) for row in rows))
        options = {"path": str(tmp_path / name), "held_out_size": 1}
        found[name] = {"source": "json_lines", "options": options, "weight": 3 if name == "a" else 1}
    return found


def test_weights_hold_in_every_cycle_and_each_source_keeps_its_epochs(sources: dict[str, dict[str, Any]]) -> None:
    mix, again = MixSource(sources, seed=1), MixSource(sources, seed=1)
    tasks = [mix.task(i) for i in range(2 * CYCLE)]
    assert tasks[CYCLE:] == [again.task(i) for i in range(CYCLE, 2 * CYCLE)]
    for cycle in (tasks[:CYCLE], tasks[CYCLE:]):
        assert Counter(task["env"] for task in cycle) == {"a": 750, "b": 250}
    drawn = [task["id"] for task in tasks if task["env"] == "a"]
    for start in range(0, len(drawn) - 4, 4):
        assert sorted(drawn[start : start + 4]) == ["a/0", "a/1", "a/2", "a/3"], "an epoch, whole"
    assert [mix.held_out(i)["id"] for i in range(2)] == ["a/4", "b/2"]


def test_a_task_is_played_in_its_environment_with_its_reward_weight(sources: dict[str, dict[str, Any]]) -> None:
    single = {"name": "single_turn", "options": {"score": "exact_match"}}
    options = {"envs": {"a": {**single, "reward_weight": 0.25}, "b": {"name": "calculator"}}}
    MixEnv.check(options)
    mix = MixSource(sources)

    async def play(name: str) -> tuple[float, int]:
        env = MixEnv(**options)
        task = next(t for t in map(mix.task, range(100)) if t["env"] == name)
        assert (await env.reset(task))[0]["content"] == task["prompt"]
        turn = await env.step({"role": "assistant", "content": "yes", "tokens": 1})
        await env.close()
        assert MixEnv.name_of(task) == name
        return turn.reward, len(env.tools)

    assert asyncio.run(play("a")) == (0.25, 0)
    assert asyncio.run(play("b")) == (1.0, 1)
    with pytest.raises(ValueError, match=r"task 'c/1' is for 'c'; env.options.envs has a, b"):
        asyncio.run(MixEnv(**options).reset({"id": "c/1", "prompt": "", "env": "c"}))


def test_groups_are_of_the_size_that_their_source_has(sources: dict[str, dict[str, Any]]) -> None:
    sources["a"]["group_size"] = 6
    mix = MixSource(sources)
    sizes = GroupSizes(mix, 4)
    assert (sizes.smallest, sizes.largest) == (4, 6)
    assert {(mix.task(i)["env"], sizes.of(i)) for i in range(100)} == {("a", 6), ("b", 4)}
    plain = GroupSizes(MixSource({"b": sources["b"]}), 4)
    assert (plain.smallest, plain.largest, plain.of(0)) == (4, 4, 4)
    sources["a"]["group_size"] = 0
    with pytest.raises(ConfigError, match=r"sources\.a\.group_size is 0"):
        MixSource(sources)


def config(sources: dict[str, Any], **sections: Any) -> Config:
    given: dict[str, Any] = {"data": {"source": "mix", "options": {"sources": sources}}}
    return Config.model_validate(given | sections)


def test_sizes_that_the_rest_cannot_hold_are_refused_before_anything_starts(sources: dict[str, dict[str, Any]]) -> None:
    sources["a"]["group_size"] = 6
    small = {"groups_per_step": 4, "group_size": 2}
    with pytest.raises(ConfigError, match=r"buffer\.capacity is 23 .* 4 groups of 6.* to at least 24"):
        open_source(config(sources, learner=small, buffer={"capacity": 23}))
    open_source(config(sources, learner=small, buffer={"capacity": 24}))
    sources["a"]["group_size"] = 1
    with pytest.raises(ConfigError, match=r"greedy_baseline .* group_size of 1"):
        open_source(config(sources, learner={"greedy_baseline": True, "advantage": "remax"}))


def test_an_environment_has_limits_of_its_own(sources: dict[str, dict[str, Any]]) -> None:
    """One turn where the others have three, and a deadline that only it misses."""
    counter = {"name": "tests.actors.envs.hosting.hosted_envs:HostedCounter", "options": {"turns": 9}}
    slow = {"name": f"{__name__}:Slow", "call_s": 0.1}
    envs = {"a": {**counter, "max_turns": 1, "max_new_tokens": 3}, "b": counter, "c": slow}
    played = Config.model_validate({"env": {"name": "mix", "options": {"envs": envs}, "max_turns": 3}})

    async def play() -> list[Any]:
        engine: Any = FakeEngine(lambda *_: [65] * 7 + [STOP])
        async with player(played, engine, FakeRenderer(), actor="actor-0") as one:
            tickets = [ticket(group=i, env=name, prompt="?") for i, name in enumerate("abc")]
            playing = [one(t, Progress(time.monotonic())) for t in tickets]
            return await asyncio.wait_for(asyncio.gather(*playing, return_exceptions=True), 20)

    a, b, c = asyncio.run(play())
    assert [(t.env, t.turns, t.stop_reason, t.num_policy_tokens) for t in (a, b)] == [
        ("a", 1, "max_turns", 3), ("b", 3, "max_turns", 24),
    ]  # fmt: skip
    assert "within 0.1 s" in str(c)
    for limit, value, said in (
        ("max_turns", 9, r"envs\.a\.max_turns is 9, above env\.max_turns = 3"),
        ("max_new_tokens", 500, r"above actors\.max_new_tokens = 128"),
        ("call_s", 0, r"envs\.a\.call_s is 0: expected a number above 0"),
    ):
        broken = {"a": {**counter, limit: value}}
        with pytest.raises(ValueError, match=said):
            Config.model_validate({"env": {"name": "mix", "options": {"envs": broken}, "max_turns": 3}})


class Slow(FakeEnv):
    def __init__(self) -> None:
        super().__init__([])

    async def step(self, message: Any) -> Any:
        await asyncio.sleep(10)


def test_what_cannot_work_is_named(sources: dict[str, dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match=r"data\.options\.sources\.a\.weight is 0"):
        MixSource({"a": {**sources["a"], "weight": 0}})
    with pytest.raises(ConfigError, match=r"data\.options\.sources\.a\.source: 'jsonlines'"):
        MixSource({"a": {"source": "jsonlines"}})
    for spec, said in (
        ({"name": "calc"}, r"envs\.x\.name: 'calc' is not a known name"),
        ({"name": "verifiers"}, "an agent; a mix holds environments"),
        ({"name": "single_turn"}, r"envs\.x\.options\.score: .* needs it"),
        ({"nme": "lookup"}, "expected {name"),
        ({"name": "lookup", "max_turn": 2}, "any of max_turns, max_tokens, max_new_tokens, call_s"),
    ):
        with pytest.raises(ValueError, match=said):
            MixEnv.check({"envs": {"x": spec}})
