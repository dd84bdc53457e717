"""The endpoint with the real openai client over real sockets; only the engine is a fake."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import openai
import pytest

from asyncrl.actors.endpoint.agent import AgentPlayer
from asyncrl.actors.endpoint.clients import Clients
from asyncrl.actors.endpoint.server import MAX_BODY_BYTES, EndpointServer
from asyncrl.actors.engines.protocol import EngineDied
from asyncrl.actors.episodes.environment_calls import EpisodeFailed
from asyncrl.actors.episodes.progress import EpisodeLimits, Progress
from asyncrl.actors.rendering.template import TemplateRenderer
from asyncrl.quickstart.tokenizer import build_tokenizer
from asyncrl.trajectory import CONTEXT, Trajectory, TurnRecord
from tests.actors.fakes import FakeEngine, ticket

TOKENIZER = build_tokenizer()
RENDERER = TemplateRenderer(TOKENIZER)
LIMITS = EpisodeLimits(max_turns=8, max_tokens=200, max_new_tokens=40, call_s=1.0)
TOOLS: Any = [{"type": "function", "function": {"name": "lookup", "description": "", "parameters": {}}}]
CALL = '<tool_call>{"name": "lookup", "arguments": {"key": "fox"}}</tool_call><|im_end|>'
USER = {"role": "user", "content": "What is fox + owl?"}
Agent = Callable[[Any, Any], Awaitable[Any]]


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return ids


def text_of(ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(ids)))


def saying(*outputs: str) -> FakeEngine:
    texts = iter(outputs)
    return FakeEngine(lambda *_: encode(next(texts)), LIMITS.max_tokens)


def played(agent: Any, engine: FakeEngine, limits: EpisodeLimits = LIMITS, **options: Any) -> Trajectory:
    async def episode() -> Trajectory:
        async with EndpointServer("policy", limits.max_tokens) as endpoint, Clients(20.0) as clients:
            play = AgentPlayer(agent, endpoint, clients, engine, RENDERER, limits, actor="a", env_name="agent")
            asked = ticket(2, group=5, kind=options.get("kind", "train"))
            return await play(asked, options.get("progress", Progress(0.0)))

    return asyncio.run(asyncio.wait_for(episode(), 20))


def ask(client: Any, messages: Sequence[Any], **options: Any) -> Any:
    return client.chat.completions.create(model="policy", messages=list(messages), **options)


def sampled(row: Any) -> str:
    return text_of(row.token_ids[row.mask])


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


def test_tokens_behind_a_stop_string_were_sampled_all_the_same() -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        await ask(client, [USER], stop=["b"])
        return 1.0

    t = played(agent, saying("a b c d<|im_end|>"))
    assert t.turn_records[0].sampled == len(encode("a b c d<|im_end|>")) > t.num_policy_tokens


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


def test_a_plain_function_gets_the_plain_client() -> None:
    def agent(task: Any, client: openai.OpenAI) -> float:
        assert isinstance(client, openai.OpenAI)
        assert [m.id for m in client.models.list()] == ["policy"]
        return float(ask(client, [USER]).choices[0].message.content)

    assert played(agent, saying("82<|im_end|>")).reward == 82.0


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


def test_a_stop_string_ends_the_answer_and_what_comes_behind_it_was_never_said() -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        choice = (await ask(client, [USER], stop=["owl", "zz"])).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("fox ", "stop")
        await ask(client, [USER, choice.message, USER])
        return 0.0

    progress = Progress(0.0)
    t = played(agent, saying("fox owl bat<|im_end|>", "82<|im_end|>"), progress=progress)
    (row,) = t.rows
    assert sampled(row) == "fox owl82<|im_end|>"
    assert "fox owl<|im_end|>\n<|im_start|>user" in text_of(row.token_ids)
    assert progress.tokens - t.num_policy_tokens == 3, "counted as generated for nothing"


def test_the_stop_string_that_comes_first_counts_in_long_answers_too() -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        choice = (await ask(client, [USER], stop=["bat", "owl ant", "never"])).choices[0]
        assert choice.message.content == "fox " * 9
        return 0.0

    (row,) = played(agent, saying("fox " * 9 + "owl ant bat" + " owl" * 9 + "<|im_end|>")).rows
    assert sampled(row) == "fox " * 9 + "owl ant"


def test_the_token_dialect_of_vllm() -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        url = str(client.base_url).removesuffix("v1/") + "inference/v1/generate"
        prompt = encode("ant bat")
        params = {"max_tokens": 5, "stop_token_ids": [7], "logprobs": 1, "temperature": 1.0}

        async def generate(ids: list[int]) -> Any:
            body = {"token_ids": ids, "sampling_params": params, "request_id": "r"}
            return await client.post(url, body=body, cast_to=object)

        answer = await generate(prompt)
        (choice,) = answer["choices"]
        assert choice["token_ids"] == encode("cow dog<|im_end|>")
        assert [p["logprob"] for p in choice["logprobs"]["content"]] == pytest.approx([0.0, -0.001, -0.002, -0.003])
        assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 4}]
        await generate([*prompt, *choice["token_ids"], *encode("eel")])
        with pytest.raises(openai.BadRequestError, match="token_ids holds 9999"):
            await generate([9999])
        for wrong in (9999, -1):  # an engine keeps a table of them
            params["stop_token_ids"] = [wrong]
            with pytest.raises(openai.BadRequestError, match=f"stop_token_ids holds {wrong}"):
                await generate(prompt)
        return 0.0

    engine = saying("cow dog<|im_end|>", "elk<|im_end|>")
    (row,) = played(agent, engine).rows
    assert sampled(row) == "cow dog<|im_end|>elk<|im_end|>"
    assert engine.calls[0][2].max_new_tokens == 5
    assert set(engine.calls[0][2].stop_token_ids) == {*RENDERER.stop_token_ids, 7}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"logprobs": True, "top_logprobs": 5}, "top_logprobs"),
        ({"n": 0}, "n"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": []}, "messages"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(options: dict[str, Any], param: str) -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**({"model": "policy", "messages": [USER]} | options))
        assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")
        await ask(client, [USER])
        return 0.0

    assert played(agent, saying("82<|im_end|>")).turns == 1


def test_temperature_is_the_runs_own_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        for _ in range(2):
            await ask(client, [USER], temperature=0.2, top_p=1.0)
        return 0.0

    engine = saying("1<|im_end|>", "2<|im_end|>")
    with caplog.at_level(logging.WARNING):
        played(agent, engine)
    assert [sampling.temperature for *_, sampling in engine.calls] == [1.0, 1.0]
    assert sum("temperature" in r.message for r in caplog.records) == 1


def test_a_greedy_ticket_does_not_accuse_the_agent(caplog: pytest.LogCaptureFixture) -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        await ask(client, [USER], temperature=1.0)
        return 0.0

    engine = saying("1<|im_end|>")
    with caplog.at_level(logging.WARNING):
        played(agent, engine, kind="eval")
    assert [sampling.temperature for *_, sampling in engine.calls] == [0.0]
    assert not any("temperature" in r.message for r in caplog.records)


def test_other_episodes_and_other_paths_are_not_found() -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        strange = client.with_options(base_url=str(client.base_url).replace("/r/", "/r/x"))
        with pytest.raises(openai.NotFoundError, match="no such episode"):
            await ask(strange, [USER])
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="policy", input="x")
        with pytest.raises(openai.APIStatusError) as caught:
            await ask(client, [{"role": "user", "content": "x" * (MAX_BODY_BYTES + 1)}])
        assert caught.value.status_code == 413
        await ask(client, [USER])
        return 0.0

    played(agent, saying("82<|im_end|>"))


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


@pytest.mark.parametrize(
    ("agent", "detail"),
    [
        (raises, "KeyError: 'door'"),
        (says_nothing, "without a reply of the policy"),
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
