"""The task of the acceptance: any answer has a reward between 0 and 1, so that the answers of a group differ."""

from __future__ import annotations

import re
from typing import Any

from asyncrl.actors.envs.protocol import Message, Task, Turn

TOKEN = re.compile(r"<(\d+)>|[!-~]")


class Questions:
    """Short questions, as a task source."""

    train_size = 4096
    held_out_size = 0

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def task(self, index: int) -> dict[str, Any]:
        return {"id": str(index), "prompt": f"question {index}: what is {index} + {index * 7 % 13}?"}

    def held_out(self, index: int) -> dict[str, Any]:
        raise IndexError(index)


class Evenness:
    """The reward is the share of an answer's tokens with an even number."""

    tools = ()

    async def reset(self, task: Task) -> list[Message]:
        return [{"role": "user", "content": task["prompt"]}]

    async def step(self, message: Message) -> Turn:
        return Turn(reward=evenness(message["content"]), done=True)

    async def close(self) -> None:
        return None


def evenness(text: str) -> float:
    """
    >>> evenness("<100><101> <102>"), evenness("!"), evenness("")
    (0.6666666666666666, 0.0, 0.0)
    """
    numbers = [int(found[1]) if found[1] else ord(found[0]) - 32 for found in TOKEN.finditer(text)]
    return sum(n % 2 == 0 for n in numbers) / max(len(numbers), 1)
