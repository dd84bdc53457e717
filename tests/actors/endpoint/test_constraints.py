"""Fields that constrain sampling are refused with the option's name, or ignored: said once, and counted."""

from __future__ import annotations

import json
import logging
from typing import Any

import openai
import pytest
from pydantic import BaseModel, ValidationError

from asyncrl.actors.counts import Counts
from asyncrl.actors.episodes.progress import Progress
from tests.actors.endpoint.playing import TOOLS, USER, ask, played, sampled, saying


class Answer(BaseModel):
    value: int


NAMED = {"type": "function", "function": {"name": "lookup"}}
SCHEMA = {"type": "json_schema", "name": "answer", "schema": {"type": "object"}}
OUTPUT = {"format": {"type": "json_schema", "schema": {"type": "object"}}}


async def post(client: Any, path: str, **body: Any) -> Any:
    return await client.post(path, body={"model": "policy"} | body, cast_to=object)


CONSTRAINED = pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/chat/completions", {"messages": [USER], "response_format": {"type": "json_object"}}, "response_format"),
        ("/chat/completions", {"messages": [USER], "tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ("/chat/completions", {"messages": [USER], "tools": TOOLS, "tool_choice": NAMED}, "tool_choice"),
        ("/chat/completions", {"messages": [USER], "guided_json": {"type": "object"}}, "guided_json"),
        ("/responses", {"input": "fox", "text": {"format": SCHEMA}}, "text.format"),
        ("/responses", {"input": "fox", "tool_choice": "required"}, "tool_choice"),
        ("/responses", {"input": "fox", "tool_choice": {"type": "function", "name": "lookup"}}, "tool_choice"),
        ("/messages", {"messages": [USER], "max_tokens": 9, "tool_choice": {"type": "any"}}, "tool_choice"),
        ("/messages", {"messages": [USER], "max_tokens": 9, "output_config": OUTPUT}, "output_config.format"),
    ],
)  # fmt: skip


@CONSTRAINED
def test_a_constraint_is_refused_by_its_own_name_and_with_the_options(
    path: str, body: dict[str, Any], field: str
) -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        with pytest.raises(openai.BadRequestError, match=r"set actors\.constraints: ignore") as caught:
            await post(client, path, **body)
        error: Any = caught.value.body
        assert error["param"] == field
        assert error["message"].startswith(f"{field} is ")
        assert len(error["message"]) < 500, "a schema is not repeated in full"
        await ask(client, [USER])
        return 0.0

    assert played(agent, saying("82<|im_end|>")).turns == 1


@CONSTRAINED
def test_under_ignore_the_same_requests_are_sampled_freely_said_once_and_counted(
    path: str, body: dict[str, Any], field: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        for _ in range(2):
            assert "82" in json.dumps(await post(client, path, **body))
        await ask(client, [USER])
        return 0.0

    engine, progress = saying("82<|im_end|>", "82<|im_end|>", "82<|im_end|>"), Progress(0.0)
    with caplog.at_level(logging.WARNING):
        t = played(agent, engine, constraints="ignore", progress=progress)
    assert (t.turns, progress.ignored_constraints) == (3, 2)
    said = [r.message for r in caplog.records if "actors.constraints" in r.message]
    assert len(said) == 1
    assert f"asks for {field} " in said[0]
    counts = Counts()
    counts.add(progress)
    assert counts.ignored_constraints == 2


def test_under_ignore_a_parsed_model_is_what_the_policy_wrote_or_an_error_of_the_agent() -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        messages: Any = [USER]
        parsed = await client.chat.completions.parse(model="policy", messages=messages, response_format=Answer)
        assert parsed.choices[0].message.parsed == Answer(value=82)
        again = await client.responses.parse(model="policy", input="fox", text_format=Answer)
        assert again.output_parsed == Answer(value=41)
        with pytest.raises(ValidationError):
            await client.chat.completions.parse(model="policy", messages=messages, response_format=Answer)
        return 0.0

    said = ['{"value": 82}<|im_end|>', '{"value": 41}<|im_end|>', "82 it is<|im_end|>"]
    t = played(agent, saying(*said), constraints="ignore")
    assert sorted(sampled(row) for row in t.rows) == sorted(said), "the one that cannot be parsed was received, too"


@pytest.mark.parametrize("field", ["presence_penalty", "logit_bias", "top_logprobs"])
def test_other_fields_that_change_the_distribution_are_refused_all_the_same(field: str) -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        with pytest.raises(openai.BadRequestError, match=f"{field} is"):
            await post(
                client, "/chat/completions", messages=[USER], **{field: {"5": 1} if field == "logit_bias" else 1}
            )
        await ask(client, [USER])
        return 0.0

    assert played(agent, saying("82<|im_end|>"), constraints="ignore").turns == 1
