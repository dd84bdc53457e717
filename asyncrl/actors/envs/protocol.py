"""The native environment protocol: messages in, messages and reward out. Token ids never come this far.

The episode loop (`asyncrl/actors/episodes/episode.py`) owns everything token-shaped: budgets, stop reasons, masks,
versions. An environment sees one assistant message at a time and answers with the messages that follow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from asyncrl.actors.envs.tool import Tool
from asyncrl.data.base import Message, Task

__all__ = ["Env", "EnvFailed", "Message", "Task", "Tool", "Turn"]


class EnvFailed(Exception):
    """What went wrong in an environment, in words that need no type before them."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An environment's answer to one assistant message."""

    messages: list[Message] = field(default_factory=list)
    """What the policy reads next, e.g. tool results. Empty is allowed only with `done`."""
    reward: float = 0.0
    """Added to the trajectory's reward."""
    done: bool = False
    """The episode is over; nothing further is sampled."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers to look at, e.g. `success`. The last value of a name in an episode counts."""
    rewards: dict[str, float] = field(default_factory=dict)
    """The parts of `reward` by name, for the record; they need not sum to it (weights are the environment's affair)."""


class Env(Protocol):
    """One instance plays one episode and is never used again.

    Whatever it raises, or a deadline it misses, costs that episode only: it is recorded as `env_error`, never as
    reward 0.
    """

    tools: Sequence[Tool]
    """What the policy may call; rendered into the prompt. Final once `reset` has returned."""

    async def reset(self, task: Task) -> list[Message]:
        """Begin the episode of `task`; returns the conversation's first messages."""
        ...

    async def step(self, message: Message) -> Turn:
        """Answer one assistant message: `content`, `tool_calls` if it makes any, `tokens` sampled for it, and `last`:
        `env.max_turns` lets the policy say no more."""
        ...

    async def close(self) -> None:
        """Give back what the episode holds. Called once, also after an error."""
        ...


class Environment:
    """Base class of environments: `reset` and `step` are enough."""

    tools: Sequence[Tool] = ()

    async def close(self) -> None:
        """Nothing to release."""
