"""The interface of environments: messages in, messages and reward out. They see no token ids.

The episode loop (`asyncrl/actors/episodes/episode.py`) owns everything token-shaped: budgets, stop reasons, masks,
versions. An environment sees one assistant message at a time and answers with the messages that follow it.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from asyncrl.actors.envs.tool import Tool
from asyncrl.data.base import Message, Task
from asyncrl.user_errors import Cause

__all__ = ["Env", "EnvFailed", "Environment", "Message", "Task", "Tool", "Turn", "state_key"]


class EnvFailed(Exception):
    """An environment's failure, with a complete message, since it is shown alone, without the exception's type."""

    def __init__(self, message: str, cause: Cause | None = None) -> None:
        """`cause`: of the failure, if it is known."""
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """An environment's answer to one assistant message: `Turn(reward=1.0, done=True)`, `Turn(messages=[...])`."""

    messages: list[Message] = field(default_factory=list)
    """The messages that the policy reads next, e.g. tool results. May be empty only with `done`."""
    reward: float = 0.0
    """What the message earned: added to the trajectory's reward, and what estimators by turn train this turn on
    (docs/reference/algorithms.md)."""
    done: bool = False
    """The episode is over; nothing further is sampled."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers to look at, e.g. `success`. The last value of a name in an episode counts."""
    rewards: dict[str, float] = field(default_factory=dict)
    """The parts of `reward` by name, for the record; they need not sum to it: the environment may weight them."""
    state: str | bytes | None = None
    """Key of the state in which `messages` leave the episode, at most 64 bytes (`state_key` makes one of a longer one).
    Turns of one group that begin in the same state have equal keys, others have not. Only compared, by
    `learner.advantage: gigpo`. None: the state has no name."""
    calls: list[tuple[str, float]] = field(default_factory=list)
    """The tools that were called, each with its seconds; the slow ones are named in the report."""


def state_key(*observed: str | bytes) -> bytes:
    """A key of 16 bytes of whatever makes up a state, e.g. its observation.

    >>> state_key("north", "lamp") == state_key("north", "lamp"), state_key("north", "lamp") == state_key("northlamp")
    (True, False)
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in observed:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


class Env(Protocol):
    """The interface that the episode loop calls. One instance plays one episode and is never used again.

    An exception, or a missed deadline, costs that episode only: it is recorded as `env_error`, never as reward 0.

    Under `buffer.turns` an episode whose actor is lost goes on elsewhere if its environment declares how
    (docs/how-to/long-episodes.md), in one of these ways, in a new instance whose `reset` was called:

    - `async def snapshot(self) -> bytes | str | None`: the state after `reset` or a `step`, or a reference to it, which
      must never change; None: at this turn there is none. `async def restore(self, state) -> None` returns to it.
    - `replayable = True`: equal actions get equal answers, so that the recorded actions can be stepped again.
    - `reset(self, task, interrupted=None)`: the episode begins again; `interrupted` is the action (a message) whose
      answer was not recorded: it may have been carried out.
    """

    tools: Sequence[Tool]
    """The tools of the policy, rendered into the prompt. Final once `reset` has returned."""

    async def reset(self, task: Task) -> list[Message]:
        """Begin the episode of `task`; returns the conversation's first messages."""
        ...

    async def step(self, message: Message) -> Turn:
        """Answer one assistant message: `content`, `tool_calls` if it makes any, `tokens` (how many were sampled for
        it), and `last` (whether it is the last that `env.max_turns` allows)."""
        ...

    async def close(self) -> None:
        """Free what the episode holds. Called once, also after an error."""
        ...


class Environment(ABC):
    """Base class of environments: an `Env` for which `reset` and `step` are enough."""

    tools: Sequence[Tool] = ()
    reset_state: str | bytes | None = None
    """Key of the state that `reset` leaves, as `Turn.state`. None: siblings with equal prompts begin in the same state,
    which no later turn returns to."""
    replayable: bool = False
    """Equal actions get equal answers in every instance with the same task: an interrupted episode may be stepped
    again from its `reset` (`buffer.turns`)."""

    @abstractmethod
    async def reset(self, task: Task) -> list[Message]: ...

    @abstractmethod
    async def step(self, message: Message) -> Turn: ...

    async def close(self) -> None:
        return None
