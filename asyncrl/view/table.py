"""The table of a run: a row per trajectory, from the ledger's rows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.buffer.client.pages import (
    BatchEntry,
    BranchEntry,
    FailureEntry,
    GroupEntry,
    Page,
    TrajectoryEntry,
)

Key = tuple[int, int]
"""Group and index."""

COLUMNS = (
    "group", "index", "step", "batch", "branch", "task", "env", "reward", "staleness", "stop", "turns", "tokens",
    "policy_tokens", "state", "reason", "actor", "attempt", "oldest", "newest", "played_s", "waited_s", "uses",
    "failures", "error", "payload", "weight",
)  # fmt: skip
"""Names of a row's values, in order. `step`, `batch` and `staleness` are those of the last use on the line of history
that led to the learner's weights, or else None."""


@dataclass
class Rows:
    """What is known of a run, added page by page."""

    groups: dict[int, GroupEntry] = field(default_factory=dict)
    trajectories: dict[Key, TrajectoryEntry] = field(default_factory=dict)
    failures: dict[Key, list[FailureEntry]] = field(default_factory=dict)
    batches: dict[int, BatchEntry] = field(default_factory=dict)
    branches: list[BranchEntry] = field(default_factory=list)

    def add(self, page: Page) -> None:
        """Replaces what is known of the groups and the batches of the page."""
        numbers = {group.number for group in page.groups}
        for known in (self.trajectories, self.failures):
            for key in [key for key in known if key[0] in numbers]:
                del known[key]
        self.groups |= {group.number: group for group in page.groups}
        self.trajectories |= {(t.group, t.index): t for t in page.trajectories}
        for failure in page.failures:
            self.failures.setdefault((failure.group, failure.index), []).append(failure)
        self.batches |= {batch.serial: batch for batch in page.batches}
        self.branches = page.branches

    @property
    def unsettled(self) -> tuple[int, int]:
        """The first group that has not ended, and the first batch that is open: what lies before stays as it is, unless
        a branch begins."""
        group = min((g.number for g in self.groups.values() if not g.ended), default=max(self.groups, default=-1) + 1)
        batch = min((b.serial for b in self.batches.values() if b.outcome is None), default=None)
        return group, batch if batch is not None else max(self.batches, default=-1) + 1

    @property
    def line(self) -> list[BatchEntry]:
        """The batches that led to the learner's weights."""
        return sorted((batch for batch in self.batches.values() if not batch.released), key=lambda batch: batch.b)

    def batch_of(self, branch: int, b: int) -> BatchEntry | None:
        """Batch b as a learner on `branch` saw it: of this branch, or of an ancestor."""
        branches = {entry.branch: entry for entry in self.branches}
        at = branches.get(branch)
        while at is not None and at.fork_batch > b and at.parent is not None and at.parent < at.branch:
            at = branches.get(at.parent)
        found = [x for x in self.batches.values() if at is not None and (x.branch, x.b) == (at.branch, b)]
        return max(found, key=lambda batch: batch.serial, default=None)


def step_of(batch: BatchEntry) -> int | None:
    """The training step, 1, 2 ..., that consumed a batch; None: none did."""
    return batch.version + 1 if batch.outcome == "applied" else None


def table(rows: Rows) -> list[list[Any]]:
    """One entry per stored trajectory, and one per ticket that failed without any, in issue order."""
    uses: dict[int, list[BatchEntry]] = {}
    for batch in sorted(rows.batches.values(), key=lambda batch: batch.serial):
        for number in batch.groups:
            uses.setdefault(number, []).append(batch)
    keys = sorted({*rows.trajectories, *rows.failures})
    return [_row(rows, key, uses.get(key[0], [])) for key in keys if key[0] in rows.groups]


def _row(rows: Rows, key: Key, uses: Iterable[BatchEntry]) -> list[Any]:
    group, t = rows.groups[key[0]], rows.trajectories.get(key)
    failures = rows.failures.get(key, [])
    used = [batch for batch in uses if not batch.released]
    last = used[-1] if used else None
    values: dict[str, Any] = {
        "group": group.number,
        "index": key[1],
        "step": None if last is None else step_of(last),
        "batch": None if last is None else last.b,
        "branch": group.branch,
        "task": group.task_id,
        "state": group.state,
        "reason": group.reason,
        "uses": [[batch.serial, batch.b, batch.branch, batch.outcome, batch.released] for batch in uses],
        "failures": len(failures),
        "error": failures[-1].detail if failures else None,
        "payload": group.payload and t is not None,
        "weight": group.weight,
    }
    if t is not None:
        values |= _of_trajectory(t, last)
    elif failures:
        values |= {"actor": failures[-1].actor, "attempt": failures[-1].attempt}
    return [values.get(name) for name in COLUMNS]


def _of_trajectory(t: TrajectoryEntry, last: BatchEntry | None) -> Mapping[str, Any]:
    versions = [version for version, _ in t.versions]
    oldest = min(versions, default=-1)
    return {
        "env": t.env,
        "reward": t.reward,
        "staleness": None if last is None else last.version - oldest,
        "stop": t.stop_reason,
        "turns": t.turns,
        "tokens": t.tokens,
        "policy_tokens": t.policy_tokens,
        "actor": t.actor,
        "attempt": t.attempt,
        "oldest": oldest,
        "newest": max(versions, default=-1),
        "played_s": None if t.issued_at is None else t.received_at - t.issued_at,
        "waited_s": None if last is None else last.fixed_at - t.received_at,
    }
