"""An answer is part of the episode exactly when the agent received it: real clients that give up, over real sockets."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import struct
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from asyncrl.actors.engines.protocol import Generation, Sampling
from tests.actors.endpoint.playing import USER, Agent, ask, encode, played, sampled, saying
from tests.actors.fakes import FakeEngine

WORDS = ("ant", "bat", "cow", "dog", "eel", "elk", "fox", "owl")


class SlowEngine(FakeEngine):
    """Takes about as long as an impatient client waits; every answer differs."""

    def __init__(self, seed: int, around_s: float) -> None:
        answers = (" ".join(words) for words in itertools.product(WORDS, repeat=3))
        super().__init__(lambda *_: encode(f"{next(answers)}<|im_end|>"))
        self._random, self._around_s = random.Random(seed), around_s

    async def generate(self, request: str, prompt: Sequence[int], sampling: Sampling) -> Generation:
        await asyncio.sleep(self._random.uniform(0.7, 1.3) * self._around_s)
        return await super().generate(request, prompt, sampling)


def text(completion: Any) -> str:
    return str(completion.choices[0].message.content)


def in_rows(trajectory: Any) -> list[str]:
    return [answer for row in trajectory.rows for answer in sampled(row).split("<|im_end|>")[:-1]]


async def finished(*requests: asyncio.Future[Any]) -> list[str]:
    ended = await asyncio.gather(*requests, return_exceptions=True)
    return [text(completion) for completion in ended if not isinstance(completion, BaseException)]


async def cancels(client: Any, got: list[str]) -> None:
    for n in range(6):
        asked = asyncio.ensure_future(ask(client, [{**USER, "content": f"ant {n}"}]))
        await asyncio.sleep(0.02)
        if not asked.done():
            asked.cancel()
        got += [
            text(c) for c in await asyncio.gather(asked, return_exceptions=True) if not isinstance(c, BaseException)
        ]


async def times_out(client: Any, got: list[str]) -> None:
    hasty = client.with_options(timeout=0.021, max_retries=2)
    for n in range(4):
        try:
            got.append(text(await ask(hasty, [{**USER, "content": f"bat {n}"}])))
        except openai.APITimeoutError:
            continue


async def asks_twice(client: Any, got: list[str]) -> None:
    for _ in range(3):
        both = [asyncio.ensure_future(ask(client, [USER])) for _ in range(2)]
        await asyncio.sleep(0.02)
        both[0].cancel()
        got += await finished(*both)


def check(impatient: Any, episodes: int) -> None:
    for seed in range(episodes):
        got: list[str] = []

        async def agent(task: Any, client: openai.AsyncOpenAI, got: list[str] = got) -> float:
            got.append(text(await ask(client, [USER])))
            await impatient(client, got)
            return 0.0

        trajectory = played(agent, SlowEngine(seed, 0.018))
        assert sorted(in_rows(trajectory)) == sorted(set(got)), seed
        assert trajectory.turns == len(set(got))


IMPATIENT = pytest.mark.parametrize(
    "impatient", [cancels, *(pytest.param(how, marks=pytest.mark.system) for how in (times_out, asks_twice))]
)


@IMPATIENT
def test_no_answer_in_a_row_that_the_agent_did_not_get_and_none_left_out(impatient: Any) -> None:
    check(impatient, 8)


@pytest.mark.slow
@IMPATIENT
def test_the_same_over_five_hundred_episodes(impatient: Any) -> None:
    check(impatient, 170)


def request_of(base_url: str, content: str) -> tuple[tuple[str, int], bytes]:
    url = urlsplit(base_url)
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": content}]}).encode()
    head = f"POST {url.path.rstrip('/')}/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
    return (str(url.hostname), int(url.port or 0)), head.encode() + body


def foreign(how: str, wait_s: float = 0.0) -> Agent:
    """An agent in plain sockets, which does with one answer what `how` names, and reads another one."""

    async def agent(task: Any, client: Any) -> float:
        address, asked = request_of(str(client.base_url), "fox")
        reader, writer = await asyncio.open_connection(*address)
        writer.write(asked)
        await writer.drain()
        connection = writer.get_extra_info("socket")
        if how == "read":
            await reader.readuntil(b"chat.completion")
        elif how == "reset":
            await asyncio.sleep(0.1)  # the answer has arrived; nobody read it
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        await asyncio.sleep(0.1)
        await ask(client, [USER])
        return 0.0

    return agent


@pytest.mark.parametrize(("how", "answers"), [("read", 2), ("reset", 1), ("closed early", 1)])
def test_a_foreign_client_received_what_was_sent_unless_its_connection_broke(how: str, answers: int) -> None:
    assert played(foreign(how), saying("cow<|im_end|>", "dog<|im_end|>")).turns == answers


def test_a_retry_after_a_lost_answer_samples_once() -> None:
    async def agent(task: Any, client: Any) -> float:
        address, asked = request_of(str(client.base_url), "fox")
        reader, writer = await asyncio.open_connection(*address)
        writer.write(asked)
        await asyncio.sleep(0.1)
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        await asyncio.sleep(0.05)
        reader, writer = await asyncio.open_connection(*address)
        writer.write(asked.replace(b"\r\n\r\n", b"\r\nx-stainless-retry-count: 1\r\n\r\n", 1))
        assert b"cow" in await reader.readuntil(b"}}")
        writer.close()
        return 0.0

    engine = saying("cow<|im_end|>", "dog<|im_end|>")
    trajectory = played(agent, engine)
    assert (len(engine.calls), in_rows(trajectory)) == (1, ["cow"])


def test_what_a_later_request_contains_was_received_whatever_became_of_its_connection() -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        address, asked = request_of(str(client.base_url), "fox")
        reader, writer = await asyncio.open_connection(*address)
        writer.write(asked)
        await reader.readuntil(b"cow")
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        await asyncio.sleep(0.05)
        said = {"role": "assistant", "content": "cow"}
        await ask(client, [{"role": "user", "content": "fox"}, said, USER])
        return 0.0

    (row,) = played(agent, saying("cow<|im_end|>", "dog<|im_end|>")).rows
    assert sampled(row) == "cow<|im_end|>dog<|im_end|>"


def test_a_stream_that_was_not_read_to_its_end_is_lost() -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        stream = await ask(client, [{**USER, "content": "ant"}], stream=True)
        await stream.response.aclose()
        assert [c async for c in await ask(client, [USER], stream=True)]
        return 0.0

    assert in_rows(played(agent, saying("cow<|im_end|>", "dog<|im_end|>"))) == ["dog"]
