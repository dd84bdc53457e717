"""The rows of a ledger as the audit reads them (reading.py), and the questions that its checks ask of them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from asyncrl.audit.chain import ChainRows
from asyncrl.buffer.ledger.records import NOTHING, Decision, Draw, Measures, Tuned

WHOLLY = (-1, -1)
"""A point before every batch and version: nothing of the branch is in the ledger."""


@dataclass(frozen=True, slots=True)
class BranchRow:
    branch: int
    parent: int | None
    fork_batch: int
    fork_version: int
    why: str

    @property
    def restored(self) -> bool:
        """Whether the ledger came from a checkpoint: later records were lost with their host."""
        return self.why.startswith("the ledger was restored")


@dataclass(frozen=True, slots=True)
class GroupRow:
    number: int
    branch: int
    draw: int
    task: int
    curriculum: int
    measured: int | None
    replaces: int | None
    task_id: str
    size: int
    state: str
    reason: str | None
    weight: float
    uses: int
    ended_batch: int | None
    ended_branch: int | None
    """On which it ended."""
    filling: int | None
    put_back: bool
    payload: bool
    durable: bool = False
    """Its tickets' turns are recorded."""
    task_env: str = ""
    """Of a mix: the environment that its task names."""
    lengths: int | None = None
    """How many lengths of episodes decided that."""


@dataclass(frozen=True, slots=True)
class AttemptRow:
    group: int
    index: int
    attempt: int
    actor: str
    branch: int
    """On which it was lent."""
    min_version: int
    ended: str | None
    issued_at: float
    """This and every other time: the buffer's clock, in seconds since the epoch; metadata, which no check uses."""
    ended_at: float | None
    serial: int
    """0, 1, 2 ... in the order of issue."""
    ended_serial: int | None = None
    """How many attempts were issued before it first ended."""


@dataclass(frozen=True, slots=True)
class TrajectoryRow:
    group: int
    index: int
    attempt: int
    actor: str
    digest: str
    segment: int
    start: int
    bytes: int
    checksum: int
    tokens: int
    policy_tokens: int
    turns: int
    reward: float
    env: str
    stop_reason: str
    received_at: float
    line: int | None
    """Its number in the actor's log."""
    head: str | None
    branch: int | None
    """On which its attempt was lent; None: its attempt is missing."""
    versions: tuple[tuple[int, int], ...]
    """(policy version, policy tokens of it), oldest first"""

    @property
    def oldest(self) -> int:
        return min((version for version, _ in self.versions), default=-1)

    @property
    def newest(self) -> int:
        return max((version for version, _ in self.versions), default=-1)

    def tokens_since(self, version: int) -> int:
        return sum(count for v, count in self.versions if v >= version)


@dataclass(frozen=True, slots=True)
class BatchRow:
    serial: int
    b: int
    branch: int
    version: int
    outcome: str | None
    released: bool
    fixed_at: float
    finished_at: float | None
    groups: tuple[int, ...]
    """Group numbers, in training order."""
    replay: Draw = NOTHING
    """Used groups beside the new ones."""
    bound: int = 0
    """The most versions that a token with loss may be old."""
    measures: Measures | None = None
    decision: Decision | None = None
    """The decision about the bound after it."""
    tuned: Tuned | None = None
    """The decision about the actors' slots after it."""
    damaged: str = ""
    """What cannot be read of measures and decisions, which are then None."""

    @property
    def version_after(self) -> int:
        return self.version + (self.outcome == "applied")


@dataclass(frozen=True, slots=True)
class DemonstrationRow:
    place: int
    draw: int
    row: int
    """Its row in the files."""
    digest: str


@dataclass(frozen=True, slots=True)
class CurriculumRow:
    serial: int
    batch: int
    version: int
    state: str
    released: bool


@dataclass(frozen=True, slots=True)
class AddedRow:
    batch: int
    task: str
    draw: int | None
    released: bool


@dataclass(frozen=True)
class LedgerRows:
    branches: dict[int, BranchRow]
    groups: dict[int, GroupRow]
    """Groups by number, in issue order."""
    attempts: dict[tuple[int, int], list[AttemptRow]]
    """Attempts by (group, index), in order."""
    trajectories: dict[tuple[int, int], TrajectoryRow]
    batches: list[BatchRow]
    """All batches that were ever fixed, in order."""
    published: dict[tuple[int, int], str]
    """Digest of the weights by (branch, version)."""
    counters: dict[tuple[int, str], int]
    """Counters by (branch, name)."""
    next_draw: int
    curriculum: dict[int, CurriculumRow]
    """States of the curriculum by serial, in order."""
    added: dict[int, AddedRow]
    """Tasks added by data.on_step_end, by index."""
    demonstrations: dict[int, list[DemonstrationRow]] = field(default_factory=dict)
    """Those that a batch takes, by its serial, in order."""
    demonstrations_digest: str | None = None
    """Digest of all rows of data.demonstrations when the run began."""
    teacher: str = ""
    """Digest of the teacher on servers whose scores it holds; empty: none."""
    restored: bool = False
    """Whether it was copied from a checkpoint, and no learner has started since, which would open a new branch."""

    in_checkpoints: frozenset[tuple[int, int, int, str]] = frozenset()
    """(branch, group, index, digest) of every trajectory in the ledger of a checkpoint at hand, if the run's own ledger
    was ever restored from one: these cannot have been lost with a host."""

    turns_in_checkpoints: frozenset[tuple[int, int, int, int, int, str, str | None]] = frozenset()
    """The same of recorded turns: as `Witnessed.turns`."""

    scores_in_checkpoints: frozenset[tuple[int, int, str]] = frozenset()
    """The same of a teacher's scores: as `Witnessed.scores`."""

    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Whole rows of `reading.TABLES`, in the order of their keys."""
    chain: ChainRows | None = None
    """None: the rows were not read from a ledger."""

    @cached_property
    def line(self) -> list[BatchRow]:
        """The batches that led to the learner's weights."""
        return sorted((batch for batch in self.batches if not batch.released), key=lambda batch: batch.b)

    @cached_property
    def members(self) -> dict[int, list[TrajectoryRow]]:
        """Stored trajectories of each group, by index."""
        members: defaultdict[int, list[TrajectoryRow]] = defaultdict(list)
        for key in sorted(self.trajectories):
            members[key[0]].append(self.trajectories[key])
        return members

    @cached_property
    def scores_used(self) -> dict[tuple[int, int], tuple[str, ...]]:
        """Digest of the scores with which a batch took a group, by serial and group."""
        return {(row["serial"], row["grp"]): (row["digest"],) for row in self.tables["score_uses"]}

    @cached_property
    def _by_place(self) -> dict[tuple[int, int], BatchRow]:
        return {(batch.branch, batch.b): batch for batch in self.batches}

    @cached_property
    def _batch_rows(self) -> dict[int, dict[str, Any]]:
        return {row["serial"]: row for row in self.tables["batches"]}

    @cached_property
    def turn_of(self) -> dict[tuple[int, int, int, int, str], dict[str, Any]]:
        """Recorded turns by group, index, attempt, number and form."""
        return {tuple(row[n] for n in ("grp", "idx", "attempt", "number", "form")): row for row in self.tables["turns"]}

    @cached_property
    def seconds_of(self) -> dict[tuple[int, int, int], float]:
        """How long an attempt took, by group, index and attempt, where the ledger has that."""
        return {(row["grp"], row["idx"], row["attempt"]): row["seconds"] for row in self.tables["lengths"]}

    def fixed_on(self, branch: int, b: int) -> BatchRow | None:
        """Batch b if it was fixed on this very branch."""
        return self._by_place.get((branch, b))

    def batch_of(self, branch: int, b: int) -> BatchRow | None:
        """Batch b as a learner on `branch` saw it: of this branch, or of an ancestor."""
        at = self.branches.get(branch)
        while at is not None and at.fork_batch > b and at.parent is not None:
            at = self.branches.get(at.parent) if at.parent < at.branch else None  # else it would have no end
        return None if at is None else self._by_place.get((at.branch, b))

    def left_behind(self, version: int, lent: int, until: int) -> BranchRow | None:
        """The first branch after `lent`, up to `until`, that began before this version; None: all of them had it."""
        later = (b for b in self.branches.values() if lent < b.branch <= until)
        return next((b for b in later if version > b.fork_version), None)

    def lent_on(self, group: int, index: int, attempt: int) -> int | None:
        """The branch on which an attempt was lent."""
        return next((a.branch for a in self.attempts.get((group, index), ()) if a.attempt == attempt), None)

    def trained_by(self, serial: int) -> dict[str, Any] | None:
        """The start of the learner that finished this batch first."""
        batch = self._batch_rows[serial]
        later = (row for row in self.tables["incarnations"] if row["incarnation"] >= batch["incarnation"])
        return next((row for row in later if row["next_batch"] > batch["b"]), None)

    def name(self, number: int, index: int) -> str:
        """Name of a trajectory, with the branch of its group."""
        group = self.groups.get(number)
        return f"{'?' if group is None else group.branch}.{number}.{index}"

    def restored_at(self, branch: int) -> tuple[int, int] | None:
        """Batch and version from which on the records of `branch` were lost with their host; None: none were.

        A branch that began on a ledger that was lost is not in this one: `WHOLLY` lost, by a restore that skips its
        number."""
        later = [b for b in self.branches.values() if b.restored and b.branch > branch]
        points = [WHOLLY if (b.parent or 0) < branch else (b.fork_batch, b.fork_version) for b in later]
        if self.restored:  # as of the checkpoint: where its learner stood
            at = [(row["next_batch"], row["version"]) for row in self.tables["incarnations"][-1:]]
            points += [WHOLLY] if branch > max(self.branches, default=0) else at or [(0, 0)]
        return min(points, default=None)
