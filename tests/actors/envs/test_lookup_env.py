import asyncio
import statistics

import pytest

from asyncrl.actors.envs import lookup
from asyncrl.actors.envs.calculator import calculate
from asyncrl.actors.envs.lookup import LookupEnv
from asyncrl.actors.envs.tool import ToolError
from asyncrl.data.sources.lookup import LookupSource
from asyncrl.errors import ConfigError
from asyncrl.rendering.tool_calls import Hermes


def assistant(text):
    content, calls = Hermes().parse(text)
    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})


async def solve(task, wrong=None):
    env = LookupEnv()
    await env.reset(task)
    values = []
    for key in task["keys"]:
        turn = await env.step(assistant(Hermes().write("lookup", {"key": key})))
        values.append(turn.messages[0]["content"])
    expression = f"{values[0]} {task['sign']} {values[1]}"
    turn = await env.step(assistant(Hermes().write("calculate", {"expression": expression})))
    return await env.step(assistant(wrong or turn.messages[0]["content"]))


def test_the_four_turns_succeed_and_nothing_less_does():
    source = LookupSource(seed=3)

    async def all_of_them():
        for index in range(60):
            turn = await solve(source.task(index))
            assert (turn.done, turn.reward, turn.metrics["success"]) == (True, 1.0, 1.0)
        turn = await solve(source.task(0), wrong="the answer is 7")
        assert (turn.done, turn.reward, turn.metrics["success"]) == (True, 0.0, 0.0)

    asyncio.run(all_of_them())


def test_an_unknown_key_is_told():
    async def one():
        env = LookupEnv()
        await env.reset({"id": "0", "prompt": "", "store": {"fox": 1}, "answer": "1"})
        return await env.step(assistant(Hermes().write("lookup", {"key": "owl"})))

    assert asyncio.run(one()).messages[0]["content"] == "error: no key owl"


def waits_of(monkeypatch, spec, task_id, episode, calls=20):
    waits = []

    async def fake_sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr(lookup.asyncio, "sleep", fake_sleep)

    async def one():
        env = LookupEnv(tool_latency_s=spec)
        await env.reset({"id": task_id, "episode": episode, "prompt": "", "store": {"fox": 1}, "answer": "1"})
        for _ in range(calls):
            await env.lookup("fox")

    asyncio.run(one())
    return waits


def test_latency_is_constant_or_long_tailed_and_seeded_by_episode(monkeypatch):
    assert waits_of(monkeypatch, 0.0, "a", 0) == []
    assert waits_of(monkeypatch, 0.25, "a", 0) == pytest.approx([0.25] * 20)
    drawn = waits_of(monkeypatch, "lognormal:0.2,1.0", "a", 0)
    assert drawn == waits_of(monkeypatch, "lognormal:0.2,1.0", "a", 0)
    assert drawn != waits_of(monkeypatch, "lognormal:0.2,1.0", "a", 1)
    assert drawn != waits_of(monkeypatch, "lognormal:0.2,1.0", "b", 0)
    many = waits_of(monkeypatch, "lognormal:0.2,1.0", "a", 2, calls=20_000)
    assert statistics.fmean(many) == pytest.approx(0.2, rel=0.1)
    assert max(many) > 2.0


@pytest.mark.parametrize("spec", ["soon", "-1", -0.5, "lognormal:1", "normal:1,1", "lognormal:1,-1", "nan"])
def test_a_latency_of_another_form_is_refused(spec):
    with pytest.raises(ConfigError, match=r"env\.options\.tool_latency_s is .*lognormal:0\.2,1\.0"):
        LookupEnv(tool_latency_s=spec)


@pytest.mark.parametrize(
    ("expression", "value"),
    [("41 - 17", "24"), ("2*(3+4)", "14"), ("7/2", "3.5"), ("8/2", "4"), ("-3 % 5", "2"), (" 9 // 2", "4")],
)
def test_the_calculator(expression, value):
    assert asyncio.run(calculate(expression)) == value


@pytest.mark.parametrize(
    "expression", ["", "2 ** 9", "__import__('os')", "1 +", "x", "1/0", "True", "1 if 1 else 2", "(" * 99, "1" * 201]
)
def test_the_calculator_refuses_anything_else(expression):
    with pytest.raises(ToolError):
        asyncio.run(calculate(expression))
