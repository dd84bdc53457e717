"""Anthropic's Messages API over real sockets; only the engine is a fake. Its own client runs in `make test-sdks`."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.actors.endpoint.playing import CALL, USER, encode, played, sampled, saying, text_of

TOOLS = [{"name": "lookup", "description": "", "input_schema": {"type": "object"}}]


async def create(client: Any, messages: list[Any], path: str = "/messages", **options: Any) -> Any:
    body = {"model": "policy", "max_tokens": 40, "messages": messages} | options
    return await client.post(path, body=body, cast_to=str if options.get("stream") else object)


def said(message: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": message["content"]}


def results(message: Any, *texts: Any) -> dict[str, Any]:
    calls = [block for block in message["content"] if block["type"] == "tool_use"]
    blocks = [{"type": "tool_result", "tool_use_id": c["id"], "content": t} for c, t in zip(calls, texts, strict=True)]
    return {"role": "user", "content": blocks}


def test_a_conversation_with_tools_is_one_row_as_in_chat_completions() -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        options = {"tools": TOOLS, "system": [{"type": "text", "text": "Be brief.", "cache_control": {}}]}
        first = await create(client, [USER], **options)
        assert (first["type"], first["role"], first["stop_reason"]) == ("message", "assistant", "tool_use")
        assert first["usage"]["output_tokens"] == 8
        (call,) = first["content"]
        assert (call["type"], call["name"], call["input"]) == ("tool_use", "lookup", {"key": "fox"})
        engine.held_version = (0, 3)
        answered = results(first, [{"type": "text", "text": "41"}])
        # The path of a client whose base URL already ends in /v1.
        second = await create(client, [USER, said(first), answered], path="/v1/messages", **options)
        assert (second["content"], second["stop_reason"]) == ([{"type": "text", "text": "82"}], "end_turn")
        return 1.0

    engine = saying(CALL, "82<|im_end|>")
    (row,) = played(agent, engine).rows
    assert "Be brief." in text_of(row.token_ids)
    assert text_of(row.token_ids).endswith("tool\n41<|im_end|>\n<|im_start|>assistant\n82<|im_end|>")
    assert sampled(row) == CALL + "82<|im_end|>"
    assert row.versions[row.mask].tolist() == [0] * 8 + [3] * 2
    assert engine.calls[1][1][: len(engine.calls[0][1]) + 8] == [*engine.calls[0][1], *encode(CALL)]


def test_a_stream_holds_the_reply_in_events() -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        events = [block.split("\n") for block in (await create(client, [USER], stream=True)).strip().split("\n\n")]
        data = [json.loads(line.removeprefix("data: ")) for _, line in events]
        assert [f"event: {event['type']}" for event in data] == [name for name, _ in events]
        assert [event["type"] for event in data] == [
            "message_start", "content_block_start", "content_block_delta", "content_block_stop",
            "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop",
        ]  # fmt: skip
        assert data[0]["message"]["content"] == []
        assert data[2]["delta"] == {"type": "text_delta", "text": "So."}
        assert data[4]["content_block"]["input"] == {}
        assert json.loads(data[5]["delta"]["partial_json"]) == {"key": "fox"}
        assert (data[-2]["delta"]["stop_reason"], data[-2]["usage"]["output_tokens"]) == ("tool_use", 11)
        return 0.0

    assert played(agent, saying("So." + CALL)).turns == 1


def test_a_stop_sequence_is_named_and_a_cut_reply_says_so() -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        reply = await create(client, [USER], stop_sequences=["owl", "zz"])
        assert (reply["content"][0]["text"], reply["stop_reason"], reply["stop_sequence"]) == (
            "fox ", "stop_sequence", "owl",
        )  # fmt: skip
        cut = await create(client, [USER], max_tokens=1)
        assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
        return 0.0

    played(agent, saying("fox owl bat<|im_end|>", "82<|im_end|>"))


def test_several_calls_and_some_that_cannot_be_parsed_come_back_as_they_were() -> None:
    text = '<tool_call>{oops</tool_call><tool_call>{"name": "lookup", "arguments": [1]}</tool_call>' + CALL

    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        first = await create(client, [USER], tools=TOOLS)
        assert [block["type"] for block in first["content"]] == ["tool_use"] * 3
        assert first["content"][0]["input"] == {"unparsed_arguments": "{oops"}
        assert first["content"][1]["input"] == {"unparsed_arguments": "[1]"}
        answered = results(first, "bad", "bad", "41")
        answered["content"].append({"type": "text", "text": "Go on."})
        await create(client, [USER, said(first), answered], tools=TOOLS)
        return 0.0

    (row,) = played(agent, saying(text, "82<|im_end|>")).rows
    assert sampled(row) == text + "82<|im_end|>"
    assert text_of(row.token_ids).index("tool\n41") < text_of(row.token_ids).index("user\nGo on.")


TEXT = {"type": "text", "text": "a"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"messages": [USER, {"role": "user", "content": [TEXT, IMAGE]}]}, "messages[1].content[1].image"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [IMAGE]}]}]},
            "messages[0].content[0].content[0].image",
        ),
        ({"messages": [USER, {"role": "assistant", "content": "It is"}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [USER], "tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"messages": [USER], "mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ({"messages": [USER], "stop_sequences": 7}, "stop_sequences.str"),
        ({"messages": [USER], "top_k": 5}, "top_k"),
        ({"messages": [USER], "n": 2}, "n"),
        ({"messages": [USER], "system": [IMAGE]}, "system[0].image"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_its_own_name_and_in_anthropics_form(
    options: dict[str, Any], param: str
) -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        with pytest.raises(openai.BadRequestError) as caught:
            await create(client, **options)
        body: Any = caught.value.response.json()
        assert (body["type"], body["error"]["type"], body["error"]["param"]) == (
            "error",
            "invalid_request_error",
            param,
        )
        await create(client, [USER], n=1)
        return 0.0

    assert played(agent, saying("82<|im_end|>")).turns == 1
