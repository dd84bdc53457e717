"""Environments behind a real OpenEnv server (examples/openenv_guess.py); one that dies is an outage, never a reward."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.actors.engines.servers.process import free_port
from asyncrl.actors.envs.adapters.openenv import OpenEnvEnv, _InvalidAction
from asyncrl.actors.envs.protocol import Turn
from tests.children import children

SERVER = f"{Path(__file__).parents[4]}/examples/openenv_guess.py"
GYMS = os.environ.get("ASYNCRL_GYMS_PYTHON", "")
with_gyms = pytest.mark.skipif(not GYMS, reason="ASYNCRL_GYMS_PYTHON names no Python with OpenEnv: make test-gyms")
TASK = {"id": "t", "prompt": "Find it.", "seed": 3}


def env(server: dict[str, Any], **options: Any) -> OpenEnvEnv:
    OpenEnvEnv.check({"server": server, **options})
    return OpenEnvEnv(server, **options)


async def say(env: OpenEnvEnv, text: str) -> Turn:
    return await env.step({"role": "assistant", "content": text})


async def reopened(server: dict[str, Any], **options: Any) -> OpenEnvEnv:
    """The server has just died, or has not come up."""
    while True:
        played = env(server, **options)
        try:
            await played.reset(TASK)
            return played
        except ConnectionError:
            await asyncio.sleep(0.1)


def run(episode: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(episode, 90))


@with_gyms
@pytest.mark.timeout(120)
def test_a_server_of_ones_own_serves_every_episode_and_ends_with_the_loop() -> None:
    server = {"command": [GYMS, SERVER, "{port}"]}

    async def episodes() -> None:
        first, second = env(server), env(server, observation="text", action="digit")
        opened, short = await asyncio.gather(first.reset(TASK), second.reset(TASK))
        assert short == [{"role": "user", "content": "Find it.\n\nWhich digit?"}]
        assert opened[0]["content"].startswith("Find it.\n\nAnswer with one action")
        assert '"digit"' in opened[0]["content"]
        assert '"metadata"' not in opened[0]["content"]
        assert opened[0]["content"].endswith('{"text": "Which digit?"}')

        assert (await say(first, '{"digit": "1"}')).messages == [{"role": "user", "content": '{"text": "higher"}'}]
        for wrong, why in (
            ("1", "no JSON object"),
            ("one", "not JSON"),
            ('{"digt": "1"}', "digit: Field required"),
            ('{"digit": 1}', "digit: Input should be a valid string"),
        ):
            (said,) = (await say(first, wrong)).messages
            assert said["content"].startswith("error: ")
            assert why in said["content"], "what is no action is the policy's to read"
        assert await say(first, '<think>hm</think>\n```json\n{"digit": "3"}\n```') == Turn(reward=1.0, done=True)
        assert (await say(second, "9")).messages == [{"role": "user", "content": "lower"}]
        await first.close()

        (keeper, process) = sorted(children(SERVER), key=lambda found: found.pid)
        assert keeper.pid == process.ppid()
        process.send_signal(signal.SIGKILL)
        with pytest.raises(ConnectionError, match="OpenEnv server, step"):
            await say(second, "3")
        await second.close()
        third = await reopened(server, observation="text", action="digit")
        assert (await say(third, "3")).reward == 1.0
        await third.close()

    run(episodes())
    assert children(SERVER) == set()


@pytest.fixture
def one_session(tmp_path: Path) -> Iterator[str]:
    file = tmp_path / "one.py"
    file.write_text(Path(SERVER).read_text().replace(", max_concurrent_envs=256", ""))
    port = free_port()
    process = subprocess.Popen([GYMS, str(file), str(port)])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(10)


@with_gyms
@pytest.mark.timeout(120)
def test_by_url_sessions_are_closed_and_a_full_server_says_so(one_session: str) -> None:
    async def opened() -> OpenEnvEnv:
        played = env({"url": one_session})
        await played.reset(TASK)
        return played

    async def episodes() -> None:
        first = await reopened({"url": one_session})
        with pytest.raises(RuntimeError, match=r"CAPACITY_REACHED: .* max_concurrent_envs"):
            await opened()
        await first.close()
        while True:  # the server takes a moment to notice
            try:
                await (await opened()).close()
                break
            except RuntimeError:
                await asyncio.sleep(0.2)
        with pytest.raises(ValueError, match=r"observation is 'txt'.*\['text'\]"):
            await env({"url": one_session}, observation="txt").reset(TASK)

    run(episodes())


@with_gyms
@pytest.mark.timeout(60)
def test_actions_that_are_calls_of_mcp_tools_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "with_tools.py"
    file.write_text(Path(SERVER).read_text().replace("(Digit, Guess,", "(Digit, Action,"))

    async def episode() -> None:
        with pytest.raises(ValueError, match="calls of MCP tools"):
            await env({"command": [GYMS, str(file), "{port}"]}).reset(TASK)

    run(episode())


@pytest.mark.timeout(60)
def test_a_server_that_is_not_there_is_said() -> None:
    async def episodes() -> None:
        with pytest.raises(ConnectionError, match="OpenEnv server http"):
            await env({"url": f"http://127.0.0.1:{free_port()}"}).reset(TASK)
        with pytest.raises(ConnectionError, match="ended with exit code 3"):
            await env({"command": [sys.executable, "-c", "exit(3)", "{port}"]}).reset(TASK)
        with pytest.raises(ConnectionError, match=r"did not serve within 0\.5 s"):
            await env({"command": ["sleep", "60{port}"]}, start_s=0.5).reset(TASK)

    run(episodes())


def test_what_cannot_work_is_refused_before_a_start() -> None:
    for server, message in (
        (None, "expected {url"),
        ({"url": "127.0.0.1:8000"}, "expected http://"),
        ({"command": "serve {port}"}, "expected a list of words"),
        ({"command": ["serve"]}, "must hold {port}"),
        ({"command": ["serve", "{port}"], "cwd": "/"}, "expected {url"),
    ):
        with pytest.raises(ValueError, match=f"env.options.server.*{message}"):
            OpenEnvEnv.check({"server": server})


def test_an_answer_of_nothing_but_brackets_is_the_policys_fault() -> None:
    played = OpenEnvEnv({"url": "http://127.0.0.1:9"})
    for answer in ("[" * 100_000, "{oops"):
        with pytest.raises(_InvalidAction, match="not JSON"):
            played._parsed(answer)
