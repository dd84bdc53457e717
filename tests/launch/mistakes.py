"""Mistakes of a user in environments, agents, scores and sources: tests/launch/test_mistakes.py makes each."""

# mypy: ignore-errors
import asyncio
import functools
import os
import time
from collections.abc import Awaitable
from pathlib import Path

from asyncrl import Environment, ToolEnvironment, Turn


class Fine(Environment):
    async def reset(self, task):
        return [{"role": "user", "content": task["prompt"]}]

    async def step(self, message):
        return Turn(done=True, reward=1.0)


class NoMethods:
    pass


class NoStep(Environment):
    async def reset(self, task):
        return []


class SyncReset(Environment):
    def reset(self, task):
        return [{"role": "user", "content": "x"}]

    async def step(self, message):
        return Turn(done=True)


class SyncStep(Fine):
    def step(self, message):
        return Turn(done=True)


class SyncClose(Fine):
    def close(self):
        pass


def timed(method):
    @functools.wraps(method)
    def called(*args):
        return method(*args)

    return called


class HandedOn(Fine):
    """Plain functions that give awaitables."""

    @timed
    async def reset(self, task):
        return await super().reset(task)

    def step(self, message) -> Awaitable[Turn]:
        return super().step(message)


class Closes(Fine):
    async def close(self):
        Path("closed").touch()  # noqa: ASYNC240


class NeedsColumn(Environment):
    async def reset(self, task):
        return [{"role": "user", "content": task["question"]}]

    async def step(self, message):
        return Turn(done=True)


class Hangs(NeedsColumn):
    async def reset(self, task):
        await asyncio.sleep(100)


class Observation(Fine):
    async def reset(self, task):
        return [{"role": "observation", "content": "It rains."}]


class Text(NeedsColumn):
    async def reset(self, task):
        return "What is 1 + 1?"


class BadInit(NeedsColumn):
    def __init__(self):
        raise ValueError("no service at home")


class Keyed(Fine):
    def __init__(self, api_key, since, urls):
        if (api_key, since, urls) != ("key-of-mine", "2026-05-17", ["http://service/v1"]):
            raise ValueError(f"no service for {api_key} since {since} at {urls}")


class Forks(Fine):
    """Leaves a child with every open file of its parent, in a session of its own or in the parent's."""

    def __init__(self, session):
        self.session = session

    async def reset(self, task):
        fork(self.session)
        return await super().reset(task)


def fork(session):
    if os.fork() == 0:
        if session:
            os.setsid()
        Path("writing").write_text(str(os.getpid()))
        Path("writing").rename("child")
        time.sleep(300)
        os._exit(0)
    while not Path("child").exists():
        time.sleep(0.01)


class Untyped(ToolEnvironment):
    def __init__(self):
        super().__init__((untyped,), "exact_match")


def untyped(a, b):
    """Add."""


class NoSuper(ToolEnvironment):
    def __init__(self):
        self.tools = [untyped]


class Exits(NeedsColumn):
    async def reset(self, task):
        raise SystemExit(1)


async def swapped(client, task): ...
async def one(task): ...
def plain(question, client): ...
async def agent(task, client):
    return 1.0


instance = 3


def score(data_source, solution_str, ground_truth, extra_info):
    return 1.0


def score_default(solution_str, ground_truth=None):
    return 1.0


class NoMembers:
    def __init__(self):
        pass


class NoHeldOut:
    train_size = 3

    def task(self, i):
        return {"id": str(i), "prompt": "x"}


class Source:
    train_size, held_out_size = 40, 4

    def held_out(self, i):
        return {"id": f"h{i}", "prompt": "x"}

    def task(self, i):
        return {"id": f"t{i}", "prompt": "x"}


class NoPrompt(Source):
    def task(self, i):
        return {"id": str(i), "question": "x"}


class Raises(Source):
    def task(self, i):
        return {}["missing"]


class RaisesOnce(Source):
    def task(self, i):
        return 1 / 0 if i == 0 else {"id": f"t{i}", "prompt": "x"}


class NullTruth(Source):
    def task(self, i):
        return {"id": f"t{i}", "prompt": "x", "ground_truth": None}


class Long(Source):
    def task(self, i):
        return {"id": f"t{i}", "prompt": "word " * 3000, "ground_truth": "1"}


class AsyncTask(Source):
    async def task(self, i):
        return {"id": f"t{i}", "prompt": "x"}


class Texts(Source):
    def task(self, i):
        return "What is 1 + 1?"


class ShareGPT(Source):
    def task(self, i):
        return {"id": f"t{i}", "prompt": [{"role": "human", "content": "What is 1 + 1?"}], "ground_truth": "2"}


class BadMessages(Source):
    def task(self, i):
        return {"id": f"t{i}", "prompt": ["a", "b"]}


class Unpackable(Source):
    def task(self, i):
        return {"id": f"t{i}", "prompt": "x", "when": object()}
