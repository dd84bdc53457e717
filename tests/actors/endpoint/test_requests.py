"""What a request may ask for, and what it gets otherwise."""

from __future__ import annotations

import logging
from typing import Any

import openai
import pytest

from asyncrl.actors.endpoint.server import MAX_BODY_BYTES
from tests.actors.endpoint.playing import RENDERER, USER, ask, encode, played, sampled, saying


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
        (
            {"messages": [USER, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[1].content[0].image_url",
        ),
        ({"messages": [{"role": "user", "content": [7]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "human", "content": "Hi"}]}, "messages"),
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
