"""What a reader of a run asks for: the ledger's rows page by page, and single trajectories (`asyncrl view`).

The same structures come from the buffer of a live run and, without it, from the ledger of one that is over.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MOST_GROUPS = 128
"""Groups in one page."""
MOST_TRAJECTORIES = 1024
"""Trajectories in one page; its first group is in it whole in any case."""
MOST_BATCHES = 1024
"""Batches in one page."""
MOST_BYTES = 64 << 20
"""Most bytes of one trajectory's record; a larger one is not handed to a reader."""
PER_S = 20
"""Requests of readers that the buffer answers in a second, of all together; it refuses others as `busy`."""
BYTES = 1 << 20
"""Bytes of a trajectory's record that cost as much as one more request."""

Serial = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class BranchEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    branch: int
    parent: int | None
    fork_batch: int


class BatchEntry(msgspec.Struct, frozen=True, array_like=True):
    serial: int
    b: int
    branch: int
    version: int
    """The learner's when the batch was fixed."""
    outcome: str | None
    """None while open."""
    released: bool
    """On a part of history that was left."""
    fixed_at: float
    finished_at: float | None
    groups: list[int]
    """In training order."""


class GroupEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    number: int
    branch: int
    task_id: str
    size: int
    state: str
    reason: str | None
    weight: float
    payload: bool
    """Whether its payloads are kept."""
    ended: bool


class TrajectoryEntry(msgspec.Struct, frozen=True, array_like=True):
    group: int
    index: int
    attempt: int
    actor: str
    digest: str
    tokens: int
    policy_tokens: int
    turns: int
    reward: float
    env: str
    stop_reason: str
    received_at: float
    issued_at: float | None
    """None where the ledger lacks the attempt."""
    versions: list[tuple[int, int]]
    """(policy version, policy tokens of it), oldest first."""


class FailureEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An attempt whose environment failed."""

    group: int
    index: int
    attempt: int
    actor: str
    detail: str
    ended_at: float | None


class Page(msgspec.Struct, frozen=True):
    """Some groups with everything that belongs to them, and the batches from a serial on."""

    groups: list[GroupEntry]
    trajectories: list[TrajectoryEntry]
    failures: list[FailureEntry]
    batches: list[BatchEntry]
    branches: list[BranchEntry]
    next: int | None
    """The group to ask for next; None: these were the last."""
