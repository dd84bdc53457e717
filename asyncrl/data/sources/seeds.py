"""Seeds as tasks, for environments that make their own game from a seed."""

from __future__ import annotations

import random

from asyncrl.data.base import Message, Task
from asyncrl.data.order import DrawnTasks

_HALF = 2**30
"""Even seeds are trained on, odd ones held out, all below 2**31."""


class SeedSource(DrawnTasks):
    """Unlimited seeds; a training seed is never held out. The environment decides whether their games differ."""

    def __init__(self, prompt: str | list[Message] = "", *, held_out_size: int = 100, seed: int = 0) -> None:
        """
        Args:
            prompt: of every task: what introduces the game to the policy.
            held_out_size: how many seeds are kept out of training.
        """
        super().__init__(held_out_size)
        self._prompt, self._seed = prompt, seed

    def draw(self, side: str, index: int) -> Task:
        drawn = random.Random(f"seeds/{self._seed}/{side}/{index}").randrange(_HALF)
        return {
            "id": f"seed-{self._seed}-{side}-{index}",
            "prompt": self._prompt,
            "seed": 2 * drawn + (side != "train"),
        }


def opening(task: Task, *texts: str) -> list[Message]:
    """The first messages of a game: the prompt of the task, if any, and `texts`, in one user message.

    >>> opening({"prompt": "Win."}, "", "Your move?")
    [{'role': 'user', 'content': 'Win.\\n\\nYour move?'}]
    """
    prompt = task.get("prompt") or ""
    before, text = ([], prompt) if isinstance(prompt, str) else (list(prompt), "")
    return [*before, {"role": "user", "content": "\n\n".join(filter(None, (text, *texts)))}]
