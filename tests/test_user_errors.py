"""An exception of the user's code is told with its own words, its file and its line, from wherever it is raised."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

import pytest

from asyncrl.actors.envs.hosting.pool import EnvWorkers
from asyncrl.actors.envs.protocol import EnvFailed, Environment, Message, Task, Turn
from asyncrl.actors.episodes.environment_calls import EpisodeFailed, GuardedEnv
from asyncrl.plugins import resolve
from asyncrl.user_errors import is_outage, user_error

MINE = """
import json
from asyncrl import Environment

class Env(Environment):
    async def reset(self, task):
        return json.loads(task["text"])["none"]

    async def step(self, message):
        raise ConnectionResetError("gone")
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return f"{tmp_path}/mine.py:Env"


async def failure(env: GuardedEnv, task: dict[str, str]) -> EpisodeFailed:
    with pytest.raises(EpisodeFailed) as failed:
        await env.reset(task)
    return failed.value


def test_the_line_is_the_users_even_when_a_library_raises(mine: str) -> None:
    async def scenario() -> None:
        env = GuardedEnv(resolve(mine, None, "env.name"), 5.0, 1e6)
        by_library = await failure(env, {"text": "{"})
        assert by_library.detail.endswith("(mine.py, line 7, in reset)"), by_library.detail
        assert "JSONDecodeError: Expecting property name" in by_library.detail
        by_user = await failure(env, {"text": "{}"})
        assert by_user.detail == "environment.reset: KeyError: 'none' (mine.py, line 7, in reset)"
        assert by_user.cause is not None
        assert by_user.cause != by_library.cause
        with pytest.raises(EpisodeFailed) as gone:
            await env.step({"role": "assistant", "content": ""})
        assert gone.value.cause is not None
        assert gone.value.cause.outage

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_worker_reports_the_same(mine: str, kind: Literal["threads", "processes"]) -> None:
    async def scenario() -> None:
        async with EnvWorkers(kind, 1, mine, {}, 5.0) as workers:
            first = await failure(GuardedEnv(workers.env, 5.0, 1e6), {"text": "{}"})
            second = await failure(GuardedEnv(workers.env, 5.0, 1e6), {"text": "{}"})
        here = await failure(GuardedEnv(resolve(mine, None, "env.name"), 5.0, 1e6), {"text": "{}"})
        assert first.detail == here.detail
        assert first.cause == second.cause == here.cause

    asyncio.run(scenario())


class SlowEnv(Environment):
    async def reset(self, task: Task) -> list[Message]:
        await asyncio.sleep(60)
        return []

    async def step(self, message: Message) -> Turn:
        return Turn(done=True)


def test_a_call_that_takes_too_long_is_an_outage() -> None:
    failed = asyncio.run(failure(GuardedEnv(SlowEnv, 0.05, 1e6), {}))
    assert failed.cause is not None
    assert failed.cause.outage
    assert "env.call_s" in failed.detail


def test_an_outage_below_another_error_is_found() -> None:
    def tool() -> None:
        try:
            raise ConnectionRefusedError("refused")
        except ConnectionRefusedError as error:
            raise RuntimeError("my tool failed") from error

    with pytest.raises(RuntimeError) as raised:
        tool()
    assert is_outage(raised.value)
    assert "RuntimeError: my tool failed (" in user_error(raised.value).text
    assert not is_outage(EnvFailed("x"))


def test_a_file_that_is_no_python_is_told_with_its_own_line_alone(mine: str) -> None:
    Path("broken.py").write_text("import os\nclass Env(:\n")
    with pytest.raises(SyntaxError) as failed:
        resolve("broken.py:Env", None, "env.name")
    assert user_error(failed.value).text == "SyntaxError: invalid syntax (broken.py, line 2)"


def test_a_file_whose_name_is_not_utf8_can_be_sent() -> None:
    with pytest.raises(ValueError, match="boom") as raised:
        exec(compile("raise ValueError('boom')", "/none/\udc80.py", "exec"))
    described = user_error(raised.value)
    assert described.text == "ValueError: boom (/none/?.py, line 1, in <module>)"
    assert described.cause.place == "ValueError at /none/?.py:1"
