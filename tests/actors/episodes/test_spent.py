from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrl.actors.counts import Counts
from asyncrl.actors.envs.protocol import Turn
from asyncrl.actors.envs.tool import ToolError
from asyncrl.actors.envs.tool_env import ToolEnvironment
from asyncrl.actors.episodes.environment_calls import EpisodeFailed, GuardedEnv
from asyncrl.actors.episodes.progress import Progress
from asyncrl.actors.episodes.spent import MOST, OTHER, Spent
from tests.actors.fakes import FakeEnv


def test_names_of_tools_have_a_bound() -> None:
    spent = Spent()
    for number in range(MOST + 30):
        spent.add(f"tool{number}", 1.0)
    assert len(spent.times) == MOST + 1
    assert (spent.times[OTHER], spent.seconds[OTHER]) == (30, 30.0)
    spent.add("a/b c\n" + "x" * 100, 1.0)
    assert all("/" not in name and " " not in name and len(name) <= 64 for name in spent.times)


def test_what_episodes_spent_is_added_up() -> None:
    counts = Counts()
    for _ in range(2):
        progress = Progress(0.0)
        progress.env, progress.seconds["environment"] = "shop", 3.0
        progress.tools.add("search", 2.0)
        counts.add(progress)
    found = dict(counts.environments.series("n", "s")) | dict(counts.tools.series("n", "s"))
    assert found == {"n/shop": 2.0, "s/shop": 6.0, "n/search": 2.0, "s/search": 4.0}


def test_a_tool_environment_tells_each_call() -> None:
    async def slow() -> str:
        """Wait."""
        await asyncio.sleep(0.05)
        return "done"

    def wrong() -> str:
        """Refuse."""
        raise ToolError("no")

    spent = Spent()
    calls = [{"id": str(i), "function": {"name": name, "arguments": "{}"}} for i, name in enumerate(["slow", "wrong"])]

    async def steps() -> None:
        env = GuardedEnv(lambda: ToolEnvironment([slow, wrong]), 10.0, 1.0, tool_called=spent.add)
        await env.reset({"prompt": "x"})
        for _ in range(2):
            await env.step({"role": "assistant", "content": "", "tool_calls": calls})

    asyncio.run(steps())
    assert spent.times == {"slow": 2, "wrong": 2}
    assert 0.1 <= spent.seconds["slow"] < 10.0


@pytest.mark.parametrize("calls", [[("a", float("nan"))], [("a",)], ["ab"], 3])
def test_calls_that_are_no_numbers_by_name_fail_the_episode(calls: Any) -> None:
    async def step() -> None:
        await GuardedEnv(lambda: FakeEnv([Turn(done=True, calls=calls)]), 10.0, 1.0).step({})

    with pytest.raises(EpisodeFailed, match=r"environment\.step returned"):
        asyncio.run(step())
