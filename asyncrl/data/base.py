"""What a task is, and where tasks come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

Message = dict[str, Any]
"""One OpenAI chat message: `role`, `content`, for an assistant optionally `tool_calls`, for a tool `tool_call_id`."""

Task = Mapping[str, Any]
"""A plain mapping that msgpack can carry. `id` (str, unique in its source) and `prompt` (str, or a list of messages)
are required; everything else belongs to the environment and the score, verl's columns (`data_source`,
`reward_model.ground_truth`, `extra_info`) included. The actor adds `episode` (int, the trajectory's index in its group)
before it hands the task to an environment, so that anything random in an episode can be seeded by it."""


class TaskSource(Protocol):
    """Tasks by position, the same for the same (seed, index) in every process and after every restart.

    The buffer keeps one number, the next index, and needs no other state to go on where it stopped.
    """

    train_size: int | None
    """Number of distinct training tasks; None: procedural, without end."""
    held_out_size: int
    """Number of held-out tasks. None of them is ever returned by `task`."""

    def task(self, index: int) -> Task:
        """The training task at `index` >= 0. A finite source goes round, in a new order each time."""
        ...

    def held_out(self, index: int) -> Task:
        """The held-out task at 0 <= `index` < `held_out_size`; IndexError beyond."""
        ...


def prompt_messages(task: Task) -> list[Message]:
    """The task's prompt as fresh chat messages: a plain string becomes one user message."""
    prompt = task["prompt"]
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(message) for message in prompt]
