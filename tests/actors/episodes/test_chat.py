"""Episodes with a served model: what its service says no room for ends them as the run's own limits do."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.actors.envs.protocol import Turn
from asyncrl.actors.episodes import chat as chat_module
from asyncrl.actors.episodes.chat import ChatResult, ContextFull, ServedModel, chat
from asyncrl.actors.episodes.environment_calls import EpisodeFailed
from asyncrl.actors.episodes.progress import EpisodeLimits
from asyncrl.actors.player import chatter
from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.rewards.http import ServiceFailed
from tests.actors.fakes import FakeEnv, ticket

LIMITS = EpisodeLimits(max_turns=4, max_tokens=100, max_new_tokens=40, call_s=1.0)
FULL = 'refused: 400 Bad Request: {"error":{"message":"This model\'s maximum context length is 100 tokens. However, ...'


def chatted(
    monkeypatch: pytest.MonkeyPatch, *answers: int | str, limits: EpisodeLimits = LIMITS
) -> tuple[ChatResult, list[Mapping[str, Any]]]:
    """An answer is the tokens of the whole conversation, or why there is none."""
    coming, asked = iter(answers), []

    async def fake_post(url: str, body: Mapping[str, Any], **_: Any) -> Any:
        asked.append(body)
        answer = next(coming)
        if isinstance(answer, str):
            raise ServiceFailed(f"{url} {answer}")
        usage = {"completion_tokens": 3, "total_tokens": answer}
        return {"choices": [{"message": {"content": "a"}}], "usage": usage}

    monkeypatch.setattr(chat_module, "post", fake_post)
    served = ServedModel("http://127.0.0.1:9/v1", "model", {}, 1.0)
    says = Turn(messages=[{"role": "user", "content": "more"}], reward=0.5)
    return asyncio.run(chat(ticket(), lambda: FakeEnv([says] * 4), served, limits)), asked


def test_a_conversation_that_grew_too_long_counts_with_what_it_earned(monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = chatted(monkeypatch, 50, 80, FULL)
    assert found.reward == 1.0
    assert [body["max_tokens"] for body in asked] == [40, 40, 20], "what env.max_tokens leaves"


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ((FULL,), ContextFull),
        ((50, "refused: 401 Unauthorized: no context length for you"), EpisodeFailed),
        ((50, "gave no answer in 4 attempts"), EpisodeFailed),
    ],
)
def test_every_other_refusal_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, answers: tuple[int | str, ...], error: type[EpisodeFailed]
) -> None:
    with pytest.raises(EpisodeFailed) as caught:
        chatted(monkeypatch, *answers)
    assert type(caught.value) is error
    assert caught.value.reason == "endpoint"


def test_truncated_sampling_is_asked_for_by_its_three_names_and_only_where_it_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("top_p", "top_k", "min_p")
    _, plain = chatted(monkeypatch, 50, 200)
    assert {name: plain[0][name] for name in names if name in plain[0]} == {"top_p": 1.0}
    _, asked = chatted(monkeypatch, 50, 200, limits=replace(LIMITS, top_p=0.9, top_k=20, min_p=0.05))
    assert [[body.get(name) for name in names] for body in asked] == [[0.9, 20, 0.05]] * 2


def test_summaries_are_refused_by_name() -> None:
    config = Config.load(overrides={"env.compact": 0.4})

    async def opened() -> None:
        async with chatter(config, ServedModel("http://127.0.0.1:9/v1", "model", {}, 1.0)):
            pass

    with pytest.raises(ConfigError, match=r"env.compact is 0.4, and a served model .* Set env.compact 0"):
        asyncio.run(opened())
