"""Agents that end, fail, wait or exceed a limit."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import threading
from typing import Any

import openai
import pytest

from asyncrl.actors.engines.protocol import EngineDied
from asyncrl.actors.episodes.environment_calls import EpisodeFailed
from asyncrl.rendering.template import TemplateRenderer
from tests.actors.endpoint.playing import LIMITS, USER, Agent, ask, encode, played, saying
from tests.actors.fakes import FakeEngine


def test_a_plain_function_gets_the_plain_client() -> None:
    def agent(task: Any, client: openai.OpenAI) -> float:
        assert isinstance(client, openai.OpenAI)
        assert [m.id for m in client.models.list()] == ["policy"]
        return float(ask(client, [USER]).choices[0].message.content)

    assert played(agent, saying("82<|im_end|>")).reward == 82.0


@pytest.mark.parametrize("asynchronous", [True, False])
def test_an_agent_that_ends_python_costs_its_episode_only(asynchronous: bool) -> None:
    def plain(task: Any, client: Any) -> float:
        sys.exit(3)

    async def agent(task: Any, client: Any) -> float:
        return plain(task, client)

    with pytest.raises(EpisodeFailed, match=r"it called sys.exit\(3\)"):
        played(agent if asynchronous else plain, saying())


def test_a_request_waits_for_new_weights() -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        engine.gate = asyncio.Event()
        asyncio.get_running_loop().call_later(0.2, engine.gate.set)
        await ask(client, [USER])
        return 0.0

    engine = saying("82<|im_end|>")
    assert played(agent, engine).turns == 1


@pytest.mark.parametrize("chars", [150_000, 2 << 20])
def test_a_long_request_is_rendered_off_the_loop_or_refused_before(chars: int, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    rendered = TemplateRenderer._encode

    def noting(self: TemplateRenderer, text: str) -> tuple[int, ...]:
        threads.append((len(text) > 20_000, threading.current_thread() is threading.main_thread()))
        return rendered(self, text)

    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        await ask(client, [USER])
        await ask(client, [{"role": "user", "content": "ab " * (chars // 3)}])
        return 1.0

    monkeypatch.setattr(TemplateRenderer, "_encode", noting)
    patient = dataclasses.replace(LIMITS, call_s=20.0)
    t = played(agent, FakeEngine(lambda *_: encode("1<|im_end|>"), LIMITS.max_tokens), patient)
    assert (t.stop_reason, t.turns, t.reward) == ("max_tokens", 1, 0.0)
    assert [place for is_long, place in threads if is_long] == ([False] if chars == 150_000 else [])


def test_limits_end_in_reward_0_and_their_stop_reason() -> None:
    async def talks_on(task: Any, client: openai.AsyncOpenAI) -> float:
        messages: list[Any] = [USER]
        while True:
            messages += [(await ask(client, messages)).choices[0].message, USER]

    turns = played(talks_on, FakeEngine(lambda *_: encode("1<|im_end|>"), 200))
    assert (turns.stop_reason, turns.turns, turns.reward) == ("max_turns", 8, 0.0)
    tokens = played(talks_on, FakeEngine(lambda *_: encode("1<|im_end|>"), 60))
    assert (tokens.stop_reason, tokens.reward) == ("max_tokens", 0.0)
    assert tokens.num_tokens <= 60


def test_a_request_for_several_choices_is_one_turn() -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        for i in range(LIMITS.max_turns):
            await ask(client, [{"role": "user", "content": str(i)}], n=3)
        return 1.0

    t = played(agent, FakeEngine(lambda *_: encode("1<|im_end|>"), 200))
    assert (t.stop_reason, t.turns, t.reward, len(t.rows)) == ("done", 8, 1.0, 24)
    assert [record.sampled for record in t.turn_records] == [3 * len(encode("1<|im_end|>"))] * 8


async def raises(task: Any, client: Any) -> float:
    raise KeyError("door")


async def says_nothing(task: Any, client: Any) -> float:
    return 1.0


async def returns_text(task: Any, client: Any) -> Any:
    await ask(client, [USER])
    return "well done"


async def interrupts(task: Any, client: Any) -> float:
    raise KeyboardInterrupt


def leaves(task: Any, client: Any) -> float:
    raise GeneratorExit


async def returns_a_huge_reward(task: Any, client: Any) -> Any:
    await ask(client, [USER])
    return {"good": 6e5, "better": 6e5}


async def returns_a_huge_integer(task: Any, client: Any) -> Any:
    await ask(client, [USER])
    return 10**400


@pytest.mark.parametrize(
    ("agent", "detail"),
    [
        (interrupts, "KeyboardInterrupt"),
        (leaves, "GeneratorExit"),
        (returns_a_huge_reward, r"1\.2e\+06.*env.max_reward"),
        (returns_a_huge_integer, "OverflowError"),
        (raises, "KeyError: 'door'"),
        (says_nothing, "got no reply of the policy: it must send a request"),
        (returns_text, "returned 'well done'; expected the reward"),
    ],
)
def test_a_fault_of_the_agent_is_no_reward(agent: Agent, detail: str) -> None:
    with pytest.raises(EpisodeFailed, match=detail) as caught:
        played(agent, saying("82<|im_end|>"))
    assert caught.value.reason == "env_error"


def test_an_engine_that_died_is_not_the_agents_affair() -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        try:
            await ask(client, [USER])
        except openai.InternalServerError:
            await asyncio.sleep(60)
        return 1.0

    def dies(*_: Any) -> list[int]:
        raise EngineDied("out of memory")

    with pytest.raises(EngineDied, match="out of memory"):
        played(agent, FakeEngine(dies))
