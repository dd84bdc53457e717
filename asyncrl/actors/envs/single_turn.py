"""One question, one answer, one score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.actors.envs.protocol import Environment, Message, Task, Turn
from asyncrl.data.base import prompt_messages
from asyncrl.rewards import ScoreSpec, build, run_score
from asyncrl.rewards import check as check_spec


class SingleTurnEnv(Environment):
    """The task's prompt, then the assistant's text goes to `score`."""

    def __init__(self, score: ScoreSpec) -> None:
        """`score`: a name (`asyncrl rewards` lists them), an import path, or several with weights: docs/rewards.md."""
        self._score = build(score, "env.options.score")
        self._task: Task = {}

    @staticmethod
    def check(options: Mapping[str, Any]) -> None:
        """Refuses a score that cannot work, before anything runs. Raises ValueError."""
        check_score(options)

    async def reset(self, task: Task) -> list[Message]:
        self._task = task
        return prompt_messages(task)

    async def step(self, message: Message) -> Turn:
        found = await run_score(self._score, self._task, message.get("content") or "", message.get("tokens"))
        rewards = dict(found.parts) or {"score": found.value}
        return Turn(reward=found.value, done=True, metrics=dict(found.metrics), rewards=rewards)


def check_score(options: Mapping[str, Any]) -> None:
    """`env.options.score`, where it is given as data. Raises ValueError."""
    score = options.get("score")
    if isinstance(score, str | dict | list):
        check_spec(score, "env.options.score")
