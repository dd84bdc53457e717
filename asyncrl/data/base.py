"""The interfaces of tasks: sources, curricula, results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

    The buffer keeps one number, the next index, and needs no other state to continue where it stopped. A source with
    groups of different sizes declares them, as `asyncrl/data/group_sizes.py` describes.
    """

    train_size: int | None
    """Number of distinct training tasks; None: procedural, unlimited."""
    held_out_size: int
    """Number of held-out tasks. None of them is ever returned by `task`."""

    def task(self, index: int) -> Task:
        """The training task at `index` >= 0. A finite source repeats its tasks, in a new order in each epoch."""
        ...

    def held_out(self, index: int) -> Task:
        """The held-out task at 0 <= `index` < `held_out_size`; IndexError beyond."""
        ...


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The result of a complete group, trained on or not."""

    index: int
    """Index of its task in the source."""
    task_id: str
    rewards: tuple[float, ...]
    """[group_size] the rewards of its trajectories."""


class Curriculum(Protocol):
    """Chooses the next task from the results so far. Called by the buffer, never by two threads at once.

    Its state changes in `update` only, so a draw follows from (state, number) alone. The buffer keeps every state with
    the batch after which it came to be: a run that continues after a crash, or from an earlier step, has the state of
    that step, and an audit draws everything again.
    """

    def draw(self, number: int) -> int:
        """Index >= 0 of the task (`TaskSource.task`) for draw `number` = 0, 1, 2 ... of the run. Has no side effect."""
        ...

    def update(self, version: int, results: Sequence[GroupResult]) -> None:
        """Take the `results` of groups completed since the last call, by number; the policy is at `version` now.

        They include dropped groups: a task that is always or never solved is filtered out of training, and the
        curriculum must still see it.
        """
        ...

    def state(self) -> Any:
        """The state in types of JSON. One per training step is kept, so it should be small (some kB)."""
        ...

    def restore(self, state: Any) -> None:
        """Restore what `state` returned, in this or another process."""
        ...


def prompt_messages(task: Task) -> list[Message]:
    """The task's prompt as fresh chat messages: a plain string becomes one user message."""
    prompt = task["prompt"]
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(message) for message in prompt]
