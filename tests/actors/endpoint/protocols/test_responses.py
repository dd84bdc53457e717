"""OpenAI's Responses API with the real openai client over real sockets; only the engine is a fake."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.actors.endpoint.playing import CALL, LIMITS, encode, played, sampled, saying, text_of
from tests.actors.fakes import FakeEngine

TOOLS: Any = [{"type": "function", "name": "lookup", "description": "", "parameters": {}, "strict": True}]
IMAGE = {"type": "input_image", "image_url": "x"}
ASKED = {"model": "policy", "instructions": "Be brief.", "tools": TOOLS}


def result(call: Any, text: Any = "41") -> Any:
    return {"type": "function_call_output", "call_id": call.call_id, "output": text}


def test_a_conversation_with_tools_is_one_row_as_in_chat_completions() -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "What is fox + owl?"}]}]
        first = await client.responses.create(**ASKED, input=items, include=["message.output_text.logprobs"])
        assert (first.status, first.output_text, first.error) == ("completed", "", None)
        assert (first.usage.output_tokens, first.model) == (8, "policy")
        (call,) = first.output
        assert (call.type, call.name, call.arguments) == ("function_call", "lookup", '{"key": "fox"}')
        engine.held_version = (0, 3)
        items += [item.model_dump() for item in first.output]
        second = await client.responses.create(
            **ASKED, input=[*items, result(call, [{"type": "input_text", "text": "41"}])]
        )
        assert second.output_text == "82"
        return 1.0

    engine = saying(CALL, "82<|im_end|>")
    t = played(agent, engine)
    (row,) = t.rows
    assert text_of(row.token_ids).startswith("<|im_start|>system\nTools: lookup")
    assert "Be brief." in text_of(row.token_ids)
    assert text_of(row.token_ids).endswith("tool\n41<|im_end|>\n<|im_start|>assistant\n82<|im_end|>")
    assert sampled(row) == CALL + "82<|im_end|>"
    assert row.versions[row.mask].tolist() == [0] * 8 + [3] * 2
    # Nothing was encoded again: the second prompt is the first, what was sampled, and the tail.
    assert engine.calls[1][1][: len(engine.calls[0][1]) + 8] == [*engine.calls[0][1], *encode(CALL)]


def test_a_stream_accumulates_to_the_reply_and_names_every_event() -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        async with client.responses.stream(**ASKED, input="fox") as stream:
            names = [event.type async for event in stream]
            (call,) = (await stream.get_final_response()).output
        assert names == [
            "response.created", "response.in_progress", "response.output_item.added",
            "response.function_call_arguments.delta", "response.function_call_arguments.done",
            "response.output_item.done", "response.completed",
        ]  # fmt: skip
        assert call.arguments == '{"key": "fox"}'
        fox = {"role": "user", "content": "fox"}
        async with client.responses.stream(**ASKED, input=[fox, call.model_dump(), result(call)]) as stream:
            text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
            final = await stream.get_final_response()
        assert (text, final.output_text, final.usage.output_tokens) == ("82", "82", 2)
        return 0.0

    (row,) = played(agent, saying(CALL, "82<|im_end|>")).rows
    assert sampled(row) == CALL + "82<|im_end|>"


def test_a_request_may_continue_an_earlier_reply_by_its_id() -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        first = await client.responses.create(model="policy", input="fox", instructions="Be brief.")
        second = await client.responses.create(
            model="policy", input="owl", instructions="Be brief.", previous_response_id=first.id
        )
        assert second.previous_response_id == first.id
        await client.responses.create(model="policy", input="ant", previous_response_id=second.id)
        with pytest.raises(openai.BadRequestError, match="expected the id of a response of this episode"):
            await client.responses.create(model="policy", input="owl", previous_response_id="resp_x")
        return 0.0

    rows = played(agent, saying("cow<|im_end|>", "dog<|im_end|>", "eel<|im_end|>")).rows
    assert [sampled(row) for row in rows] == ["cow<|im_end|>dog<|im_end|>", "eel<|im_end|>"]
    assert "Be brief." not in text_of(rows[1].token_ids), "instructions are not carried over"
    assert "cow<|im_end|>" in text_of(rows[1].token_ids)


def test_a_reply_that_was_cut_off_is_incomplete_also_as_a_stream() -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        reply = await client.responses.create(model="policy", input="fox", max_output_tokens=2)
        assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (reply.output_text, reply.output[0].status) == ("cow ", "incomplete")
        stream = await client.responses.create(model="policy", input="ox", max_output_tokens=2, stream=True)
        assert [event.type async for event in stream][-1] == "response.incomplete"
        return 0.0

    assert played(agent, saying("cow dog eel", "cow dog eel")).stop_reason == "length"


def test_text_beside_calls_and_calls_that_cannot_be_parsed_come_back_as_they_were() -> None:
    said = "So.<tool_call>{oops</tool_call>" + CALL

    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        first = await client.responses.create(**ASKED, input="fox")
        assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
        assert (first.output[1].name, first.output[1].arguments) == ("", "{oops")
        items: Any = [{"role": "user", "content": "fox"}, *(item.model_dump() for item in first.output)]
        await client.responses.create(**ASKED, input=[*items, *(result(call) for call in first.output[1:])])
        return 0.0

    (row,) = played(agent, saying(said, "82<|im_end|>")).rows
    assert sampled(row) == said + "82<|im_end|>"


def test_two_replies_in_a_row_are_two_messages() -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        items: list[Any] = [{"role": "user", "content": "fox"}]
        for _ in range(3):
            items += [item.model_dump() for item in (await client.responses.create(model="policy", input=items)).output]
        return 0.0

    (row,) = played(agent, saying("cow<|im_end|>", "dog<|im_end|>", "eel<|im_end|>")).rows
    assert sampled(row) == "cow<|im_end|>dog<|im_end|>eel<|im_end|>"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].input_image"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": []}, "input"),
        ({"input": "fox", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "fox", "background": True}, "background"),
        ({"input": "fox", "conversation": "c"}, "conversation"),
        ({"input": "fox", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "fox", "top_logprobs": 3}, "top_logprobs"),
        ({"input": 7}, "input"),
        ({"input": "fox", "extra_body": {"n": 2}}, "n"),
        ({"input": "fox", "extra_body": {"n": "2"}}, "n"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_its_own_name(options: dict[str, Any], param: str) -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="policy", **options)
        assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")
        await client.responses.create(model="policy", input="fox", extra_body={"n": 1})
        return 0.0

    assert played(agent, saying("82<|im_end|>")).turns == 1


def test_a_limit_of_the_episode_is_told_in_the_protocols_words() -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="policy", input="fox " * 200)
        assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
        await client.responses.create(model="policy", input="fox")
        return 0.5

    t = played(agent, FakeEngine(lambda *_: encode("82<|im_end|>"), LIMITS.max_tokens))
    assert (t.reward, t.stop_reason) == (0.5, "max_tokens")
