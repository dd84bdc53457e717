"""The judge that compares the answers of a group, against an HTTP server that answers as told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.rewards.group_score import GroupAnswer, open_group_score
from asyncrl.rewards.scores.judge import JudgeFailed
from asyncrl.rewards.scores.listwise import ListwiseJudge
from tests.rewards.scores.test_judge import FakeEndpoint, endpoint

__all__ = ["endpoint"]

TASK = {"id": "colour", "prompt": "Name a colour."}
WORDS = ("red", "a stone", "blue")


def judged(endpoint: FakeEndpoint, **options: Any) -> dict[str, float]:
    """What each of the answers got."""
    score = ListwiseJudge(endpoint.url, "m", **options)
    answers = [GroupAnswer([{"role": "assistant", "content": word}], 0.0, {}) for word in WORDS]
    return dict(zip(WORDS, asyncio.run(score(TASK, answers)), strict=True))


def test_numbers_come_back_to_the_answers_that_they_are_for(endpoint: FakeEndpoint) -> None:
    endpoint.says("Answer 2 is odd.\nScores: 1, 2, 3")
    found = judged(endpoint)
    asked = endpoint.asked[0]["messages"][0]["content"]
    assert "Name a colour." in asked
    shown = sorted(WORDS, key=lambda word: asked.index(f">\n{word}\n</answer>"))
    assert shown != list(WORDS), "in an order drawn for the task"
    assert [found[word] for word in shown] == [0.1, 0.2, 0.3]


def test_nonsense_is_asked_again_and_then_an_outage(endpoint: FakeEndpoint) -> None:
    nonsense = ("Scores: 1, 2", "Scores: 1, 2, 30", "I like them all", None)
    endpoint.says(*nonsense, "**Scores**: 10, 0, 5.5")
    assert sorted(judged(endpoint, retries=4).values()) == [0.0, 0.55, 1.0]
    endpoint.says(*nonsense)
    with pytest.raises(JudgeFailed, match="no 3 numbers from 0 to 10 in 4 answers; the last: None"):
        judged(endpoint, retries=3)


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"group_score": "listwise"}, "env.group_score: 'listwise' is not a known name"),
        ({"group_score": "listwise_judge"}, r"env.group_score_options.base_url: ListwiseJudge needs it"),
        (
            {"group_score": "listwise_judge", "group_score_options": {"base_url": "u", "model": "m", "prompt": "{x}"}},
            "it knows prompt, answers, count",
        ),
    ],
)
def test_what_cannot_work_is_refused(env: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        open_group_score(Config.model_validate({"env": env}))
