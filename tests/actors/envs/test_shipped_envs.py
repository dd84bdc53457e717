"""The shipped examples of ToolEnvironment, played as the episode loop plays them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from asyncrl.actors.envs.calculator import CalculatorEnv
from asyncrl.actors.envs.python_tool import PythonToolEnv
from asyncrl.rewards.sandbox import SandboxFailed
from tests.rewards.sandbox.test_sandbox import needs_namespaces

TASK = {"id": "t", "prompt": "What is 6 * 7?", "ground_truth": "42"}


def calls(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "0", "type": "function", "function": function}]}


def play(env: Any, *messages: dict[str, Any]) -> list[Any]:
    async def episode() -> list[Any]:
        await env.reset(TASK)
        turns = [await env.step(message) for message in messages]
        await env.close()
        return turns

    return asyncio.run(episode())


def test_calculator() -> None:
    tool, end = play(CalculatorEnv(), calls("calculate", expression="6 * 7"), {"content": "42", "tokens": 1})
    assert (tool.messages[0]["content"], end.reward, end.done) == ("42", 1.0, True)


@needs_namespaces
def test_python_runs_in_the_sandbox_and_its_errors_are_the_policys_to_read() -> None:
    env = PythonToolEnv(sandbox={"memory_mb": 128, "processes": 8}, timeout_s=1.5)
    turns = play(
        env,
        calls("python", code="print(6 * 7)"),
        calls("python", code="x = 1 / 0"),
        calls("python", code="while True: pass"),
        calls("python", code="x = 1"),
        {"content": "41"},
    )
    said = [turn.messages[0]["content"] for turn in turns[:-1]]
    assert said[0] == "42"
    assert "ZeroDivisionError" in said[1]
    assert said[1].endswith("[exit code 1]")
    assert said[2] == "[killed after 1.5 s]"
    assert said[3] == "[nothing was printed]"
    assert (turns[-1].reward, turns[-1].done) == (0.0, True)


def test_a_sandbox_that_is_away_is_no_fault_of_the_policy() -> None:
    env = PythonToolEnv(sandbox={"url": "http://127.0.0.1:9", "retries": 0})
    with pytest.raises(SandboxFailed):
        play(env, calls("python", code="1"))
