"""The times of each received reply, and of the agent after it."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import openai

from asyncrl.actors.episodes.progress import Progress
from asyncrl.trajectory import Span, TurnRecord, TurnReward
from tests.actors.endpoint.playing import LIMITS, USER, ask, encode, played
from tests.actors.fakes import FakeEngine


class Ticking:
    """A clock that the engine and the agent advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def working(clock: Ticking, *outputs: str, seconds: float = 2.0) -> FakeEngine:
    class Working(FakeEngine):
        async def generate(self, *args: Any) -> Any:
            clock.now += seconds
            return dataclasses.replace(await super().generate(*args), queue_s=0.5)

    texts = iter(outputs)
    return Working(lambda *_: encode(next(texts)), LIMITS.max_tokens)


def test_each_received_answer_has_its_times_and_the_agents_after_it() -> None:
    clock = Ticking()

    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        clock.now += 100.0  # before its first request: in no turn
        answer = await ask(client, [USER])
        clock.now += 7.0
        await ask(client, [USER, answer.choices[0].message, {"role": "user", "content": "more"}])
        clock.now += 3.0
        return 1.0

    engine = working(clock, "a<|im_end|>", "bc<|im_end|>")
    t = played(agent, engine, progress=Progress(0.0, clock=clock))
    first, second = (len(prompt) for _, prompt, _ in engine.calls)
    assert len(t.rows) == 1
    a, b = len(encode("a<|im_end|>")), len(encode("bc<|im_end|>"))
    assert t.turn_records == (
        TurnRecord(0.5, 2.0, 7.0, first, a),
        TurnRecord(0.5, 2.0, 3.0, second - first - a, b),
    )
    assert t.turn_rewards == (TurnReward(0.0, (Span(0, first, a),)), TurnReward(1.0, (Span(0, second, b),)))


def test_only_received_answers_have_a_record_and_parallel_ones_share_no_time() -> None:
    clock = Ticking()

    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        await ask(client, [USER], n=2)
        clock.now += 7.0
        lost = asyncio.ensure_future(ask(client, [{"role": "user", "content": "nobody waits"}]))
        await asyncio.sleep(0.2)
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        clock.now += 5.0
        return 1.0

    engine = working(clock, "a<|im_end|>", "b<|im_end|>", "c<|im_end|>")
    holding = asyncio.Event()
    generate = engine.generate

    async def third_is_slow(*args: Any) -> Any:
        if len(engine.calls) == 2:
            await holding.wait()
        return await generate(*args)

    engine.generate = third_is_slow  # type: ignore[method-assign]
    t = played(agent, engine, progress=Progress(0.0, clock=clock))
    assert t.turns == len(t.turn_records) == 1
    assert [turn.environment for turn in t.turn_records] == [7.0]
