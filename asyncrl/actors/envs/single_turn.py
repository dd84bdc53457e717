"""One question, one answer, one score."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.actors.envs.protocol import Message, Task, Tool, Turn
from asyncrl.actors.envs.score import Score, run_score
from asyncrl.data.base import prompt_messages
from asyncrl.plugins import resolve


class SingleTurnEnv:
    """The task's prompt, then the assistant's text goes to `score`."""

    tools: Sequence[Tool] = ()

    def __init__(self, score: Score | str) -> None:
        """`score`: a callable with verl's signature, or its import path `package.module:name` or `file.py:name`."""
        self._score: Score = resolve(score, {}, "env.options.score") if isinstance(score, str) else score
        self._task: Task = {}

    async def reset(self, task: Task) -> list[Message]:
        self._task = task
        return prompt_messages(task)

    async def step(self, message: Message) -> Turn:
        reward, numbers = await run_score(self._score, self._task, message.get("content") or "")
        return Turn(reward=reward, done=True, metrics=numbers, rewards={"score": reward})

    async def close(self) -> None:
        return None
