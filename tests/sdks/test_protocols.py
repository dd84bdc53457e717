"""The endpoint's protocols as the real SDKs read them, streams included; only the engine is a fake."""

from __future__ import annotations

import dataclasses
import json
from importlib.util import find_spec
from typing import Any

import pytest

from tests.actors.endpoint.playing import CALL, LIMITS, encode, played, sampled, saying
from tests.actors.fakes import FakeEngine
from tests.sdks.relay import Relay

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("agents") is None, reason="the agents' SDKs are not installed: make test-sdks"),
]
LOOKUP: Any = {"name": "lookup", "description": "", "input_schema": {"type": "object", "properties": {}}}
ANSWER = "82<|im_end|>"


def anthropic_client(base_url: Any, **options: Any) -> Any:
    import anthropic

    root = str(base_url).removesuffix("/").removesuffix("/v1")
    return anthropic.AsyncAnthropic(base_url=root, api_key="asyncrl", **options)


def lookup(key: str) -> str:
    """Look up a key."""
    return {"fox": "41"}[key]


def one_row(agent: Any, constraints: str = "refuse") -> None:
    """`agent` receives a call, gives its result, and receives the answer: one row, as in chat completions."""
    (row,) = played(agent, saying(CALL, ANSWER), constraints=constraints).rows
    assert sampled(row) == CALL + ANSWER


@pytest.mark.parametrize("streamed", [False, True])
def test_anthropics_client(streamed: bool) -> None:
    async def agent(task: Any, client: Any) -> float:
        claude = anthropic_client(client.base_url)
        messages: list[Any] = [{"role": "user", "content": "fox"}]

        async def ask() -> Any:
            asked: Any = {"model": "policy", "max_tokens": 40, "messages": messages, "tools": [LOOKUP]}
            if not streamed:
                return await claude.messages.create(**asked)
            async with claude.messages.stream(**asked) as stream:
                return await stream.get_final_message()

        first = await ask()
        (call,) = first.content
        assert (call.name, call.input, first.stop_reason) == ("lookup", {"key": "fox"}, "tool_use")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "41"}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = await ask()
        assert (second.content[0].text, second.stop_reason, second.usage.output_tokens) == ("82", "end_turn", 2)
        return 1.0

    one_row(agent)


def test_anthropics_own_retry_after_a_lost_reply_samples_once() -> None:
    async def agent(task: Any, client: Any) -> float:
        async with Relay(str(client.base_url), "reset", 0) as relay:
            claude = anthropic_client(relay.base_url)
            user: Any = {"role": "user", "content": "fox"}
            message = await claude.messages.create(model="policy", max_tokens=40, messages=[user])
            assert (message.content[0].text, relay.broken) == ("82", 1)
            return 0.0

    engine = saying(ANSWER, "41<|im_end|>")
    assert played(agent, engine).turns == 1
    assert len(engine.calls) == 1


def test_anthropics_client_reads_refusals_as_errors_of_its_own() -> None:
    import anthropic

    image = {"type": "image", "source": {"type": "url", "url": "x"}}

    async def agent(task: Any, client: Any) -> float:
        claude = anthropic_client(client.base_url)
        for content, tool_choice, words in (
            ([image], {"type": "auto"}, r"messages\[0\].content\[0\].image"),
            ("fox", {"type": "any"}, "set actors.constraints: ignore"),
        ):
            asked: Any = {"messages": [{"role": "user", "content": content}], "tools": [LOOKUP]}
            with pytest.raises(anthropic.BadRequestError, match=words):
                await claude.messages.create(model="policy", max_tokens=9, tool_choice=tool_choice, **asked)
        await claude.messages.create(model="policy", max_tokens=9, messages=[{"role": "user", "content": "fox"}])
        return 0.0

    assert played(agent, saying(ANSWER)).turns == 1


@pytest.mark.parametrize("streamed", [False, True])
def test_openai_agents(streamed: bool) -> None:
    async def agent(task: Any, client: Any) -> float:
        from agents import Agent, OpenAIResponsesModel, RunConfig, Runner, function_tool

        model = OpenAIResponsesModel(model="policy", openai_client=client)
        solver = Agent(name="solver", model=model, tools=[function_tool(lookup)])
        quiet = RunConfig(tracing_disabled=True)
        if streamed:
            result: Any = Runner.run_streamed(solver, "fox", run_config=quiet)
            assert [event async for event in result.stream_events()]
        else:
            result = await Runner.run(solver, "fox", run_config=quiet)
        assert result.final_output == "82"
        return 1.0

    one_row(agent)


@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
@pytest.mark.parametrize("streamed", [False, True])
def test_pydantic_ai(protocol: str, streamed: bool) -> None:
    async def agent(task: Any, client: Any) -> float:
        from pydantic_ai import Agent
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
        from pydantic_ai.providers.anthropic import AnthropicProvider
        from pydantic_ai.providers.openai import OpenAIProvider

        if protocol == "messages":
            claude = AnthropicProvider(anthropic_client=anthropic_client(client.base_url))
            model: Any = AnthropicModel("policy", provider=claude)
        else:
            kind = OpenAIChatModel if protocol == "chat" else OpenAIResponsesModel
            model = kind("policy", provider=OpenAIProvider(openai_client=client))
        solver = Agent(model, tools=[lookup])
        if streamed:
            async with solver.run_stream("fox") as result:
                assert await result.get_output() == "82"
        else:
            assert (await solver.run("fox")).output == "82"
        return 1.0

    one_row(agent)


@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
@pytest.mark.parametrize("streamed", [False, True])
def test_langchains_models(protocol: str, streamed: bool) -> None:
    async def agent(task: Any, client: Any) -> float:
        from langchain_anthropic import ChatAnthropic
        from langchain_core.messages import HumanMessage, ToolMessage
        from langchain_core.tools import tool
        from langchain_openai import ChatOpenAI

        url: Any = str(client.base_url)
        if protocol == "messages":
            root = url.removesuffix("/").removesuffix("/v1")
            model: Any = ChatAnthropic(model="policy", base_url=root, api_key="asyncrl", max_tokens=40)
        else:
            responses = protocol == "responses"
            model = ChatOpenAI(model="policy", base_url=url, api_key="asyncrl", use_responses_api=responses)
        bound = model.bind_tools([tool(lookup)])

        async def ask(messages: Any) -> Any:
            if not streamed:
                return await bound.ainvoke(messages)
            chunks = [chunk async for chunk in bound.astream(messages)]
            whole = chunks[0]
            for chunk in chunks[1:]:
                whole += chunk
            return whole

        messages: list[Any] = [HumanMessage("fox")]
        first = await ask(messages)
        (call,) = first.tool_calls
        messages += [first, ToolMessage(lookup(**call["args"]), tool_call_id=call["id"])]
        assert (await ask(messages)).text == "82"
        return 1.0

    one_row(agent)


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
@pytest.mark.parametrize("streamed", [False, True])
def test_litellm(provider: str, streamed: bool) -> None:
    async def agent(task: Any, client: Any) -> float:
        import litellm

        url = (
            str(client.base_url) if provider == "openai" else str(client.base_url).removesuffix("/").removesuffix("/v1")
        )
        function = {"name": "lookup", "description": "", "parameters": {"type": "object", "properties": {}}}
        messages: list[Any] = [{"role": "user", "content": "fox"}]

        async def ask() -> Any:
            reply = await litellm.acompletion(
                model=f"{provider}/policy", api_base=url, api_key="asyncrl", messages=messages, stream=streamed,
                tools=[{"type": "function", "function": function}], max_tokens=40,
            )  # fmt: skip
            if streamed:
                reply = litellm.stream_chunk_builder([chunk async for chunk in reply])
            return reply.choices[0].message

        first = await ask()
        (call,) = first.tool_calls
        result = lookup(**json.loads(call.function.arguments))
        messages += [first.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": result}]
        assert (await ask()).content == "82"
        return 1.0

    one_row(agent)


def test_a_typed_result_of_pydantic_ai_is_asked_for_again_until_the_policy_gives_it() -> None:
    async def agent(task: Any, client: Any) -> float:
        from pydantic_ai import Agent
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client))
        solver = Agent(model, output_type=int, retries=3)
        assert (await solver.run("fox")).output == 82
        return 1.0

    typed = '<tool_call>{"name": "final_result", "arguments": {"response": 82}}</tool_call><|im_end|>'
    texts = iter(["cow<|im_end|>", typed])
    engine = FakeEngine(lambda *_: encode(next(texts)), 2000)  # what pydantic-ai says to a wrong result is long
    t = played(agent, engine, dataclasses.replace(LIMITS, max_tokens=2000, max_new_tokens=200), constraints="ignore")
    assert "".join(sampled(row) for row in t.rows) == "cow<|im_end|>" + typed
