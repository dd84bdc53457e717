"""Episodes with a resources server of NeMo Gym: one written from its contract, and the real one where that runs."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from asyncrl.actors.engines.servers.process import free_port
from asyncrl.actors.envs.adapters.nemo_gym import NemoGymEnv
from asyncrl.actors.envs.adapters.server import url_of
from asyncrl.actors.envs.protocol import Message, Turn
from asyncrl.data.sources.nemo_gym import NemoGymSource, messages_of
from asyncrl.errors import ConfigError

HERE = Path(__file__).parent
FAKE = {"command": [sys.executable, str(HERE / "fake_nemo_gym.py"), "{port}"]}
REAL = os.environ.get("ASYNCRL_NEMO_GYM_PYTHON", "")
WEATHER = "resources_servers.example_mcp_weather.app:ExampleMCPWeatherResourcesServer"
COUNTER = "resources_servers.example_session_state_mgmt.app:StatefulCounterResourcesServer"


def row(**more: Any) -> dict[str, Any]:
    tools = [
        {
            "type": "function", "name": name, "description": "", "strict": True,
            "parameters": {"type": "object", "properties": {field: {"type": "integer"} for field in fields}},
        }
        for name, fields in (("increment_counter", ["count"]), ("get_counter_value", []))
    ]  # fmt: skip
    asked = {"input": [{"role": "developer", "content": "Count."}, {"role": "user", "content": "Add 3."}]}
    return {"responses_create_params": {**asked, "tools": tools}, "initial_count": 4, "expected_count": 7, **more}


def task(**more: Any) -> dict[str, Any]:
    made = row(**more)
    return {"id": "t", "prompt": messages_of(made["responses_create_params"]["input"]), "row": made}


def call(*calls: tuple[str, dict[str, Any] | str], content: str = "") -> Message:
    made = [{"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for n, (name, arguments) in enumerate(calls)]  # fmt: skip
    return {"role": "assistant", "content": content, "tool_calls": made}


def says(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


async def opened(server: dict[str, Any], **more: Any) -> NemoGymEnv:
    NemoGymEnv.check({"server": server})
    env = NemoGymEnv(server)
    await env.reset(task(**more))
    return env


async def reopened() -> NemoGymEnv:
    """The server has just died."""
    while True:
        try:
            return await opened(FAKE)
        except ConnectionError:
            await asyncio.sleep(0.1)


def run(episode: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(episode, 100))


async def plays(server: dict[str, Any]) -> tuple[Turn, Turn]:
    """Two sessions beside each other: one counts to 7, the other only thinks."""
    first, second = NemoGymEnv(server), NemoGymEnv(server)
    messages, _ = await asyncio.gather(first.reset(task()), second.reset(task()))
    assert messages == [{"role": "system", "content": "Count."}, {"role": "user", "content": "Add 3."}]
    assert [tool.name for tool in first.tools] == ["increment_counter", "get_counter_value"]
    assert first.tools[0].schema["function"]["parameters"]["properties"] == {"count": {"type": "integer"}}

    turn = await first.step(call(("increment_counter", {"count": 1}), ("increment_counter", {"count": 2})))
    assert [json.loads(said["content"]) for said in turn.messages] == [{"success": True}] * 2
    turn = await first.step(call(("increment_counter", {"count": "x"}), ("get_counter", {}), ("", "{not json")))
    told = [said["content"] for said in turn.messages]
    assert all(said.startswith("error: ") for said in told), "the policy's to read"
    assert "count" in told[0]
    turn = await first.step(call(("get_counter_value", {}), content="<think>done?</think>Let me see."))
    assert json.loads(turn.messages[0]["content"]) == {"count": 7}, "the session's own"
    over = await first.step(says("It is 7."))
    cut_off = await second.step(call(("increment_counter", {"count": 3})) | {"last": True})
    await first.close()
    await second.close()
    return over, cut_off


@pytest.mark.timeout(120)
def test_tools_sessions_and_verify() -> None:
    async def episodes() -> None:
        over, cut_off = await plays(FAKE)
        assert (over.reward, over.done, over.metrics["calls"], over.metrics["turns"]) == (1.0, True, 6.0, 4.0)
        assert (cut_off.reward, cut_off.done, cut_off.metrics["max_turns"]) == (0.0, True, 1.0)
        in_parts = await opened(FAKE, parts=True, expected_count=4)
        assert (await in_parts.step(says("4"))).rewards == {"right": 1.0, "short": 0.5}
        await in_parts.close()
        async with httpx.AsyncClient() as http:
            assert (await http.get(await url_of(FAKE, 1.0) + "/sessions")).json() == {"open": 0, "closed": 3}

    run(episodes())


def test_a_server_that_hangs_at_the_end_keeps_no_connection_open() -> None:
    async def hangs(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(600)
        return httpx.Response(200)

    async def closing() -> None:
        env = NemoGymEnv({"url": "http://127.0.0.1:9"})
        env._http = httpx.AsyncClient(transport=httpx.MockTransport(hangs), base_url="http://127.0.0.1:9")
        with pytest.raises(TimeoutError):  # as past env.call_s
            await asyncio.wait_for(env.close(), 0.1)
        assert env._http.is_closed

    run(closing())


@pytest.mark.timeout(120)
def test_an_outage_is_no_reward() -> None:
    async def episodes() -> None:
        for count, error in ((500, "500"), (503, "503: busy")):
            env = await opened(FAKE)
            with pytest.raises(RuntimeError, match=f"increment_counter: {error}"):
                await env.step(call(("increment_counter", {"count": count})))
            await env.close()
        lost = await opened(FAKE, lost=True)
        with pytest.raises(RuntimeError, match=r"session_lost: asked for \(mask_sample\)"):
            await lost.step(says("7"))
        with pytest.raises(RuntimeError, match="seed_session: 422"):
            await opened(FAKE, initial_count=None)
        mcp = {**row()["responses_create_params"], "tools": []}
        with pytest.raises(ConnectionError, match=r"MCP server http.*/mcp"):
            await opened(FAKE, mcp=True, responses_create_params=mcp)

        dying, beside = await opened(FAKE), await opened(FAKE)
        with pytest.raises(ConnectionError, match="NeMo Gym server, increment_counter"):
            await dying.step(call(("increment_counter", {"count": 666})))
        with pytest.raises(ConnectionError, match="NeMo Gym server, verify"):
            await beside.step(says("7"))
        await beside.close()
        again = await reopened()
        assert (await again.step(says("4"))).reward == 0.0
        with pytest.raises(ConnectionError, match="seed_session"):
            await opened({"url": f"http://127.0.0.1:{free_port()}"})

    run(episodes())


@pytest.mark.skipif(not REAL, reason="ASYNCRL_NEMO_GYM_PYTHON names no Python with nemo-gym (docs/how-to)")
@pytest.mark.timeout(120)
def test_the_real_server() -> None:
    server = {"command": [REAL, str(HERE / "nemo_gym_server.py"), COUNTER, "{port}"]}

    async def episodes() -> None:
        over, cut_off = await plays(server)
        assert (over.reward, over.done, over.metrics["turns"]) == (1.0, True, 4.0)
        assert (cut_off.reward, cut_off.done) == (0.0, True)

    run(episodes())


@pytest.mark.skipif(not REAL, reason="ASYNCRL_NEMO_GYM_PYTHON names no Python with nemo-gym (docs/how-to)")
@pytest.mark.timeout(120)
def test_tools_over_mcp_of_the_real_server() -> None:
    server = {"command": [REAL, str(HERE / "nemo_gym_server.py"), WEATHER, "{port}"]}

    async def episodes() -> None:
        nothing = {"input": "Paris?", "tools": []}
        first, second = [await opened(server, responses_create_params=nothing) for _ in range(2)]
        (tool,) = first.tools
        assert [*tool.schema["function"]["parameters"]["properties"]] == ["city"]
        weather = (await first.step(call(("get_weather", {"city": "Paris"})))).messages[0]["content"]
        assert "sunny" in weather
        assert (await first.step(says(weather))).reward == 1.0
        assert (await second.step(says(weather))).reward == 0.0, "a session of its own, which called nothing"
        await first.close()
        await second.close()

    run(episodes())


def test_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row(expected_count=n)) for n in range(4)) + "\n\n")
    source = NemoGymSource(str(file), held_out_size=1)
    assert source.held_out(0)["row"] == row(expected_count=3)
    assert {source.task(index)["row"]["expected_count"] for index in range(3)} == {0, 1, 2}
    assert source.task(0)["prompt"][0] == {"role": "system", "content": "Count."}
    for line, why in (
        ("{", "line 1: JSONDecodeError"),
        ("{}", "KeyError: 'responses_create_params'"),
        ('{"responses_create_params": {"input": []}}', "the input is empty"),
        ('{"responses_create_params": {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}}', "image"),
    ):
        file.write_text(line)
        with pytest.raises(ConfigError, match=why):
            NemoGymSource(str(file))
    with pytest.raises(ConfigError, match="is not a file"):
        NemoGymSource("missing.jsonl")


def test_a_history_in_the_input() -> None:
    call = {"type": "function_call", "name": "add", "arguments": '{"n": 1}', "call_id": "c1"}
    said = {"type": "function_call_output", "call_id": "c1", "output": "2"}
    thought = {"type": "reasoning", "id": "r", "summary": []}
    function = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"n": 1}}}
    assert messages_of([{"role": "user", "content": "1+1?"}, thought, call, said]) == [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [function]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
