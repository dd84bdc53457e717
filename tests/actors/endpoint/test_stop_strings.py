"""A stop string cuts a reply off; what was sampled after it is no part of it."""

from __future__ import annotations

from typing import Any

import openai

from asyncrl.actors.episodes.progress import Progress
from tests.actors.endpoint.playing import USER, ask, encode, played, sampled, saying, text_of


def test_tokens_behind_a_stop_string_were_sampled_all_the_same() -> None:
    async def agent(task: Any, client: openai.AsyncOpenAI) -> float:
        await ask(client, [USER], stop=["b"])
        return 1.0

    t = played(agent, saying("a b c d<|im_end|>"))
    assert t.turn_records[0].sampled == len(encode("a b c d<|im_end|>")) > t.num_policy_tokens


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
