"""Which requests of an agent are one, with the real openai client over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import openai
import pytest

from tests.actors.actor_stage import until
from tests.actors.endpoint.playing import USER, ask, played, sampled, saying, text_of


async def abandon(engine: Any, request: Coroutine[Any, Any, Any]) -> None:
    """Leaves, as a client does whose time is over, once the engine is at work for it."""
    asked = asyncio.ensure_future(request)
    await until(lambda: bool(engine.calls))
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked


def test_a_request_that_comes_again_is_answered_once() -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        engine.gate = asyncio.Event()
        await abandon(engine, ask(client, [USER]))
        again = asyncio.create_task(ask(client, [USER]))
        await asyncio.sleep(0.1)
        engine.gate.set()
        assert (await again).choices[0].message.content == "cow"
        key = {"idempotency-key": "k1"}
        one, two = [await ask(client, [USER], extra_headers=key) for _ in range(2)]
        assert one.choices[0].message.content == two.choices[0].message.content == "dog"
        # Whoever listens is answered: two equal questions beside each other are two.
        both = await asyncio.gather(ask(client, [USER]), ask(client, [USER]))
        assert sorted(b.choices[0].message.content for b in both) == ["eel", "elk"]
        return 0.0

    engine = saying("cow<|im_end|>", "dog<|im_end|>", "eel<|im_end|>", "elk<|im_end|>")
    t = played(agent, engine)
    assert (len(engine.calls), t.turns, len(t.rows)) == (4, 4, 4)


def test_a_retry_that_arrives_before_its_broken_connection_is_noticed_is_the_same_request() -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        engine.gate = asyncio.Event()
        lost = asyncio.create_task(ask(client, [USER]))
        await asyncio.sleep(0.1)
        again = asyncio.create_task(ask(client, [USER], extra_headers={"x-stainless-retry-count": "1"}))
        await asyncio.sleep(0.1)
        engine.gate.set()
        assert (await again).choices[0].message.content == (await lost).choices[0].message.content == "cow"
        return 0.0

    engine = saying("cow<|im_end|>", "dog<|im_end|>")
    t = played(agent, engine)
    assert (len(engine.calls), t.turns, len(t.rows)) == (1, 1, 1)


def test_an_answer_that_nobody_waited_for_is_no_part_of_the_episode() -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        engine.gate = asyncio.Event()
        await abandon(engine, ask(client, [{**USER, "content": "ant"}]))
        engine.gate.set()
        await ask(client, [USER])
        return 0.0

    engine = saying("cow<|im_end|>", "dog<|im_end|>")
    assert [sampled(row) for row in played(agent, engine).rows] == ["dog<|im_end|>"]
    assert text_of(engine.said) == "cow<|im_end|>dog<|im_end|>"
