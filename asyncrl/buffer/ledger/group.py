"""A group as the buffer sees it: its state, and the facts about each trajectory without its arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from asyncrl.buffer.ledger.storage.payloads import Location
from asyncrl.trajectory import CONTEXT, LogHead, Trajectory

State = Literal["in_flight", "waiting", "assigned", "trained", "dropped"]
Reason = Literal["stale", "filtered", "env_error", "wait_deadline", "guard", "poison", "discarded_branch"]
VersionCounts = tuple[tuple[int, int], ...]
"""(policy version, policy tokens of it), oldest first."""


@dataclass(frozen=True, slots=True)
class Received:
    """One stored trajectory."""

    attempt: int
    actor: str
    digest: str
    location: Location
    versions: VersionCounts
    tokens: int
    """Tokens of all rows, context included: the cost of training on it."""
    turns: int
    reward: float
    env: str
    stop_reason: str
    logged: LogHead | None = None
    """Its line in its actor's log."""

    @classmethod
    def of(cls, trajectory: Trajectory, versions: VersionCounts, digest: str, location: Location) -> Received:
        return cls(
            trajectory.attempt,
            trajectory.actor,
            digest,
            location,
            versions,
            trajectory.num_tokens,
            trajectory.turns,
            trajectory.reward,
            trajectory.env,
            trajectory.stop_reason,
            trajectory.logged,
        )

    @property
    def policy_tokens(self) -> int:
        return sum(n for _, n in self.versions)


def version_counts(trajectory: Trajectory) -> VersionCounts:
    rows = trajectory.rows
    versions = rows[0].versions if len(rows) == 1 else np.concatenate([row.versions for row in rows])
    newest = int(np.maximum.reduce(versions))
    tokens = trajectory.num_policy_tokens
    if np.count_nonzero(versions == newest) == tokens:  # the usual case, without a copy
        return ((newest, tokens),)
    values, counts = np.unique(versions[versions != CONTEXT], return_counts=True)
    return tuple(zip(values.tolist(), counts.tolist(), strict=True))


@dataclass(slots=True, eq=False)
class Group:
    """Changed by the ledger's transitions only."""

    number: int
    """Unique over all branches, in issue order."""
    branch: int
    draw: int
    task_id: str
    size: int
    state: State
    replaces: int | None = None
    reason: Reason | None = None
    weight: float = 1.0
    """0 if a filter rejected the group but it was kept to avoid starving the learner; its advantage is 0."""
    uses: int = 0
    """In applied batches."""
    task: int = 0
    """Index into the task source."""
    curriculum: int = 0
    """Serial of the curriculum's state that chose it."""
    measured: int | None = None
    """Serial of the first state that knows its rewards."""
    durable: bool = False
    """Turns of its episodes are recorded (`buffer.turns`)."""
    task_env: str = ""
    """Of a mix: the environment that its task names."""
    lengths: int | None = None
    """How many lengths of episodes decided that (`buffer.turns: auto`)."""
    attempts: list[int] = field(init=False)
    """[size] attempts at each ticket so far; the last one has number attempts - 1."""
    failures: list[int] = field(init=False)
    """[size] attempts at each ticket whose environment failed."""
    stored: list[Received | None] = field(init=False)
    """[size] changed by `store` only."""
    oldest: int | None = field(init=False, default=None)
    """Oldest version among the stored policy tokens; None while nothing is stored."""
    newest: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.attempts, self.failures, self.stored = [0] * self.size, [0] * self.size, [None] * self.size

    def store(self, index: int, trajectory: Received | None) -> None:
        """Stores a trajectory; None removes it."""
        before, self.stored[index] = self.stored[index], trajectory
        # Computed once per put and not when they are read: every step reads those of all live groups.
        if trajectory is not None and before is None:
            oldest, newest = trajectory.versions[0][0], trajectory.versions[-1][0]
            self.oldest = oldest if self.oldest is None else min(self.oldest, oldest)
            self.newest = newest if self.newest is None else max(self.newest, newest)
            return
        stored = self.trajectories
        self.oldest = min((r.versions[0][0] for r in stored), default=None)
        self.newest = max((r.versions[-1][0] for r in stored), default=None)

    @property
    def complete(self) -> bool:
        return all(self.stored)

    @property
    def trajectories(self) -> list[Received]:
        return [r for r in self.stored if r is not None]

    @property
    def tokens(self) -> int:
        return sum(r.tokens for r in self.stored if r is not None)

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(r.reward for r in self.stored if r is not None)

    def policy_tokens(self, since: int = 0) -> int:
        """Policy tokens of version `since` or later."""
        return sum(n for r in self.stored if r is not None for version, n in r.versions if version >= since)
