"""A mix keeps its weights, loses no task and repeats none; each task is played where it belongs."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from asyncrl.actors.envs.mix import MixEnv
from asyncrl.data.mix import CYCLE, MixSource
from asyncrl.errors import ConfigError


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
    with pytest.raises(ValueError, match=r"task 'c/1' is of 'c'; env.options.envs has a, b"):
        asyncio.run(MixEnv(**options).reset({"id": "c/1", "prompt": "", "env": "c"}))


def test_what_cannot_work_is_named(sources: dict[str, dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match=r"data\.options\.sources\.a\.weight is 0"):
        MixSource({"a": {**sources["a"], "weight": 0}})
    with pytest.raises(ConfigError, match=r"data\.options\.sources\.a\.source: 'jsonlines'"):
        MixSource({"a": {"source": "jsonlines"}})
    for spec, said in (
        ({"name": "calc"}, r"envs\.x\.name: 'calc' is not a known name"),
        ({"name": "verifiers"}, "an agent; a mix is of environments"),
        ({"name": "single_turn"}, r"envs\.x\.options\.score: .* needs it"),
        ({"nme": "lookup"}, "expected {name"),
    ):
        with pytest.raises(ValueError, match=said):
            MixEnv.check({"envs": {"x": spec}})
