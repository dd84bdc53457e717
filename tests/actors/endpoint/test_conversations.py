"""Conversations of agents become rows, with the real openai client over real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import openai
import pytest

from asyncrl.trajectory import CONTEXT
from tests.actors.endpoint.playing import CALL, TOOLS, USER, ask, encode, played, sampled, saying, text_of


def test_a_conversation_with_tools_is_one_row() -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        assert (task["episode"], task["prompt"]) == (2, "Hello")
        first = await ask(client, [USER], tools=TOOLS, logprobs=True, seed=3)
        (choice,) = first.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("lookup", '{"key": "fox"}')
        assert "".join(p.token for p in choice.logprobs.content) == CALL
        assert [p.logprob for p in choice.logprobs.content] == pytest.approx([-k / 1000 for k in range(8)])
        assert first.usage.completion_tokens == 8
        engine.held_version = (0, 3)
        result = {"role": "tool", "tool_call_id": call.id, "content": "41"}
        second = await ask(client, [USER, choice.message, result], tools=TOOLS)
        assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("82", "stop")
        return 1.0

    engine = saying(CALL, "82<|im_end|>")
    t = played(agent, engine)
    (row,) = t.rows
    assert text_of(row.token_ids).endswith("tool\n41<|im_end|>\n<|im_start|>assistant\n82<|im_end|>")
    assert sampled(row) == CALL + "82<|im_end|>"
    assert row.versions[row.mask].tolist() == [0] * 8 + [3] * 2
    assert set(row.versions[~row.mask]) == {CONTEXT}
    np.testing.assert_allclose(row.logprobs[row.mask], -np.arange(10) / 1000)
    assert (t.reward, t.rewards, t.turns, t.stop_reason, t.env) == (1.0, {}, 2, "done", "agent")
    # Nothing was encoded again: the second prompt is the first, what was sampled, and the tail.
    assert engine.calls[1][1][: len(engine.calls[0][1]) + 8] == [*engine.calls[0][1], *encode(CALL)]


def test_streaming_says_the_same() -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> dict[str, float]:
        stream = await ask(client, [USER], tools=TOOLS, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage.completion_tokens == 8
        (call,) = [c for chunk in chunks if chunk.choices for c in chunk.choices[0].delta.tool_calls or []]
        assert call.function.arguments == '{"key": "fox"}'
        echo = {"id": call.id, "type": "function", "function": call.function.model_dump()}
        messages = [USER, {"role": "assistant", "tool_calls": [echo]}, {"role": "tool", "content": "41"}]
        stream = await ask(client, messages, tools=TOOLS, stream=True)
        deltas = [chunk.choices[0] async for chunk in stream]
        assert "".join(d.delta.content or "" for d in deltas) == "82"
        assert [d.finish_reason for d in deltas if d.finish_reason] == ["stop"]
        return {"right": 1.0, "short": 0.5}

    t = played(agent, saying(CALL, "82<|im_end|>"))
    assert len(t.rows) == 1
    assert (t.reward, t.rewards) == (1.5, {"right": 1.0, "short": 0.5})


def test_branches_and_choices_are_rows_in_which_each_token_carries_loss_once() -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        first = (await ask(client, [USER])).choices[0].message
        again = {"role": "user", "content": "ant"}
        await asyncio.gather(*(ask(client, [USER, first, {**again, "content": w}]) for w in ("ant", "bat")))
        both = await ask(client, [USER], n=2)
        assert [c.message.content for c in both.choices] == ["eel", "elk"]
        return 0.0

    t = played(agent, saying("cow<|im_end|>", "crab<|im_end|>", "deer<|im_end|>", "eel<|im_end|>", "elk<|im_end|>"))
    said = [sampled(row).replace("<|im_end|>", " ").split() for row in t.rows]
    assert said == [["cow", "crab"], ["deer"], ["eel"], ["elk"]]
    assert "cow" in text_of(t.rows[1].token_ids)
    assert t.turns == 4, "a request is a turn, however many choices it has"


def test_an_edited_history_is_a_new_row() -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        first = (await ask(client, [USER])).choices[0].message
        await ask(client, [USER, {"role": "assistant", "content": f" {first.content}"}, USER])
        return 0.0

    assert [sampled(row) for row in played(agent, saying("cow<|im_end|>", "dog<|im_end|>")).rows] == [
        "cow<|im_end|>", "dog<|im_end|>",
    ]  # fmt: skip
