"""The public names for environments: their defaults, and the names that they had before."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys

import pytest

from asyncrl.actors.envs import ENVIRONMENTS, tool_env
from asyncrl.actors.envs.protocol import Environment, Message, Task, Turn
from asyncrl.actors.episodes.environment_calls import GuardedEnv
from asyncrl.plugins import resolve


class Guess(Environment):
    async def reset(self, task: Task) -> list[Message]:
        return [{"role": "user", "content": task["prompt"]}]

    async def step(self, message: Message) -> Turn:
        return Turn(reward=1.0, done=True)


def test_reset_and_step_are_enough() -> None:
    async def episode() -> None:
        env = GuardedEnv(Guess, 1.0, 1e6)
        assert [m["content"] for m in await env.reset({"id": "t", "prompt": "Which digit?"})] == ["Which digit?"]
        assert env.tools == []
        assert await env.step({"role": "assistant", "content": "3"}) == Turn(messages=[], reward=1.0, done=True)
        await env.close()

    asyncio.run(episode())


def test_an_environment_without_step_is_refused() -> None:
    with pytest.raises(TypeError, match="step"):
        type("Half", (Environment,), {"reset": Guess.reset})()


def test_a_turn_has_no_positions() -> None:
    with pytest.raises(TypeError, match="positional"):
        Turn([])  # type: ignore[misc]


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_name_means_something(name: str) -> None:
    assert callable(resolve(name, ENVIRONMENTS, "env.name"))


def test_the_table_imports_nothing() -> None:
    code = (
        "import sys, asyncrl.actors.envs; print(*sorted(m for m in sys.modules if m.startswith(('asyncrl', 'pydan'))))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert loaded == ["asyncrl", "asyncrl.actors", "asyncrl.actors.envs", "asyncrl.actors.envs.agent"]


def test_no_shipped_environment_needs_torch() -> None:
    modules = sorted({path.partition(":")[0] for path in ENVIRONMENTS.values()})
    code = f"import sys, {', '.join(modules)}; print(*{{'torch', 'transformers', 'vllm', 'ray'}} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert loaded == []


def test_the_old_name_of_the_tool_environment_warns() -> None:
    with pytest.warns(DeprecationWarning, match="ToolEnvironment"):
        assert tool_env.ToolEnv is tool_env.ToolEnvironment


def test_the_path_that_vllm_serve_was_given_warns() -> None:
    pytest.importorskip("vllm")
    with pytest.warns(DeprecationWarning, match=r"engines\.vllm\.worker"):
        old = importlib.import_module("asyncrl.actors.engines.vllm_worker")
    assert old.WorkerExtension.__module__ == "asyncrl.actors.engines.vllm.worker"
