"""Plays episodes with a scripted client, without a model: python test_agent.py, or pytest."""

import asyncio
import json
from random import Random
from types import SimpleNamespace

from agent import agent, use
from tasks import task


class ScriptedClient:
    """A client whose policy says `texts`; one that starts with a tool's name and a space is a call of it."""

    def __init__(self, *texts):
        self.texts = list(texts)
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self.create))

    async def create(self, **request):
        name, _, argument = self.texts.pop(0).partition(" ")
        parameter = {"lookup": "key", "calculate": "expression"}.get(name)
        function = SimpleNamespace(name=name, arguments=json.dumps({parameter: argument}))
        calls = [SimpleNamespace(id="1", function=function)] if parameter else None
        message = SimpleNamespace(content=None if parameter else name, tool_calls=calls)
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])


def reward(*texts):
    given = {"prompt": "What is fox + owl?", "ground_truth": "92"}
    return asyncio.run(agent(given, ScriptedClient(*texts)))["success"]


def test_the_right_answer_is_rewarded_and_a_wrong_one_is_not():
    calls = ["lookup fox", "lookup owl", "calculate 38 + 54"]
    assert reward(*calls, "92") == 1
    assert reward(*calls, "16") == 0


def test_an_agent_without_end_is_ended():
    assert reward(*["lookup fox"] * 6) == 0


def test_a_wrong_call_is_told_to_the_policy():
    assert use("lookup", '{"key": "unicorn"}').startswith("error: ")
    assert use("lookup", "no JSON").startswith("error: ")
    assert use("buy", "{}") == "error: no tool buy"


def test_every_task_has_an_answer():
    assert all(int(task(Random(seed))["ground_truth"]) < 200 for seed in range(20))


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(f"passed: {name}")
