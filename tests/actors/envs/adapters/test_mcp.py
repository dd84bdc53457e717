"""Tools of a real MCP server, over stdio and over HTTP; a server that dies costs episodes, not the run."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.actors.envs.adapters import mcp
from asyncrl.actors.envs.adapters.mcp import McpToolEnv
from asyncrl.data.base import Message

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="the extra mcp is not installed")
SERVER = str(Path(__file__).with_name("mcp_server.py"))
STDIO = {"command": [sys.executable, SERVER]}
TASK = {"id": "t", "prompt": "sun?", "ground_truth": "41"}


def call(name: str, **arguments: str) -> Message:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def env(server: dict[str, Any], **options: Any) -> McpToolEnv:
    McpToolEnv.check({"servers": [server], "score": "exact_match"})
    return McpToolEnv([server], "exact_match", **options)


async def said(env: McpToolEnv, name: str, **arguments: str) -> str:
    return str((await env.step(call(name, **arguments))).messages[0]["content"])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.timeout(60)
@pytest.mark.system
def test_over_stdio_a_dead_server_costs_its_episodes_and_is_started_again() -> None:
    pids = []

    async def episodes() -> None:
        first, second = env(STDIO), env(STDIO)
        await asyncio.gather(first.reset(TASK), second.reset(TASK))
        assert [tool.name for tool in first.tools] == ["lookup", "process"]
        assert first.tools[0].schema["function"]["parameters"]["required"] == ["key"]
        assert await said(first, "lookup", key="sun") == "41"
        assert (await said(first, "lookup", key="mars")).startswith("error: ")
        assert (await said(first, "lookup", lock="sun")).startswith("error: "), "the policy's fault, and told to it"
        pids.extend([await said(first, "process"), await said(second, "process")])
        with pytest.raises(ConnectionError, match=r"MCP server .*lookup"):
            await first.step(call("lookup", key="poison"))
        with pytest.raises(ConnectionError):
            await second.step(call("lookup", key="sun"))
        third = env(STDIO)
        await third.reset(TASK)
        pids.append(await said(third, "process"))
        turn = await third.step({"role": "assistant", "content": "41"})
        assert (turn.reward, turn.done) == (1.0, True)

    asyncio.run(episodes())
    assert pids[0] == pids[1] != pids[2]
    assert not any(alive(int(pid)) for pid in pids), "servers end with the actor's loop"


SLOW = """
import asyncio, os, time
from mcp.server import MCPServer

server = MCPServer("slow")

@server.tool()
async def block() -> str:
    time.sleep(600)

@server.tool()
async def wait() -> str:
    await asyncio.sleep(600)

@server.tool()
async def process() -> str:
    return str(os.getpid())

server.run("stdio")
"""


@pytest.mark.timeout(60)
@pytest.mark.system
@pytest.mark.parametrize(("tool", "survives"), [("block", False), ("wait", True)])
def test_a_server_that_a_call_blocks_is_ended_and_one_whose_call_is_slow_is_not(
    tool: str, survives: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, each later call of the actor to a blocked server waited for its deadline, to the end of the run."""
    monkeypatch.setattr(mcp, "SILENT_S", 3.0)
    (tmp_path / "slow.py").write_text(SLOW)
    server = {"command": [sys.executable, str(tmp_path / "slow.py")]}
    pids = []

    async def episodes() -> None:
        first = env(server, tool_timeout_s=5.0)
        await first.reset(TASK)
        pids.append(int(await said(first, "process")))
        slow = env(server, tool_timeout_s=0.5)
        await slow.reset(TASK)
        with pytest.raises(TimeoutError, match="tool_timeout_s"):
            await slow.step(call(tool))
        (connection,) = mcp._shared[asyncio.get_running_loop()].values()
        async with asyncio.timeout(20):
            while connection._probe is not None if survives else not connection._task.done():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        after = env(server, tool_timeout_s=5.0)
        await after.reset(TASK)
        pids.append(int(await said(after, "process")))
        if not survives:
            with pytest.raises(ConnectionError):
                await said(first, "process")

    asyncio.run(episodes())
    assert (pids[0] == pids[1]) == survives
    assert not any(map(alive, pids))


@pytest.mark.timeout(60)
@pytest.mark.system
def test_a_server_of_ones_own_ends_with_the_episode() -> None:
    async def episode() -> int:
        played = env(STDIO, per_episode=True, only=["process"])
        await played.reset(TASK)
        assert [tool.name for tool in played.tools] == ["process"]
        pid = int(await said(played, "process"))
        await played.close()
        assert not alive(pid)
        return pid

    assert asyncio.run(episode()) != os.getpid()


def test_a_server_that_takes_its_time_to_end_keeps_no_other_from_it() -> None:
    class FakeConnection:
        told = 0

        async def close(self) -> None:
            FakeConnection.told += 1
            await asyncio.sleep(600)

    async def closing() -> None:
        played = env(STDIO, per_episode=True)
        played._own = [FakeConnection(), FakeConnection()]  # type: ignore[list-item]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(played.close(), 0.1)

    asyncio.run(closing())
    assert FakeConnection.told == 2


@pytest.fixture
def http() -> Iterator[tuple[dict[str, str], subprocess.Popen[bytes]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield {"url": f"http://127.0.0.1:{port}/mcp"}, process
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.timeout(60)
def test_over_http(http: tuple[dict[str, str], subprocess.Popen[bytes]]) -> None:
    server, process = http

    async def episodes() -> None:
        played = env(server, tool_timeout_s=10.0)
        await played.reset(TASK)
        assert await said(played, "lookup", key="moon") == "17"
        process.kill()
        process.wait(10)
        with pytest.raises((ConnectionError, TimeoutError)):
            await played.step(call("lookup", key="sun"))
        with pytest.raises(ConnectionError, match="MCP server http"):
            await env(server).reset(TASK)

    asyncio.run(episodes())


def test_a_server_that_does_not_start_is_told_to_have_an_environment_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text("import a_package_of_its_own\n")
    lacking = {"command": ["{python}", str(tmp_path / "server.py")]}
    with pytest.raises(ConnectionError, match=r"command: \[/path/to/venv/bin/python, server\.py\]"):
        asyncio.run(env(lacking, connect_s=20.0).reset(TASK))


def test_what_cannot_work_is_refused_before_a_start() -> None:
    for server, message in (
        ({"comand": ["x"]}, "expected {command"),
        ({"env": {}}, "expected {command"),
        ({"command": "python x.py"}, "expected a list of words"),
        ({"url": "localhost"}, "expected http://"),
    ):
        with pytest.raises(ValueError, match=f"servers.0.*{message}"):
            McpToolEnv.check({"servers": [server], "score": "exact_match"})
