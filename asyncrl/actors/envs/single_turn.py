"""One question, one assistant message, one score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.actors.envs.protocol import Environment, Message, Task, Turn
from asyncrl.data.base import prompt_messages
from asyncrl.rewards import ScoreSpec, build, run_score
from asyncrl.rewards import check as check_spec


class SingleTurnEnv(Environment):
    """Gives the task's prompt and scores the assistant's text."""

    def __init__(self, score: ScoreSpec) -> None:
        """`score`: a name (see `asyncrl rewards`), an import path, or several with weights (docs/how-to/rewards.md)."""
        self._score = build(score, "env.options.score")
        self._task: Task = {}

    @staticmethod
    def check(options: Mapping[str, Any]) -> None:
        """Check the score before anything runs. Raises ValueError."""
        check_score(options)

    async def reset(self, task: Task) -> list[Message]:
        self._task = task
        return prompt_messages(task)

    async def step(self, message: Message) -> Turn:
        scored = await run_score(self._score, self._task, message.get("content") or "", message.get("tokens"))
        rewards = dict(scored.parts) or {"score": scored.value}
        return Turn(reward=scored.value, done=True, metrics=dict(scored.metrics), rewards=rewards)


def check_score(options: Mapping[str, Any]) -> None:
    """Check `env.options.score` and `turn_score` where they are given as data. Raises ValueError."""
    for name in ("score", "turn_score"):
        score = options.get(name)
        if isinstance(score, str | dict | list):
            check_spec(score, f"env.options.{name}")
