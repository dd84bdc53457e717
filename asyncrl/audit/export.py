"""Exports one row per trajectory: of a whole run, or of one training step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.audit.ledger import BatchRow, TrajectoryRow
from asyncrl.audit.witnesses import Evidence
from asyncrl.errors import ConfigError


def of_step(evidence: Evidence, step: int) -> list[dict[str, Any]]:
    """The trajectories of training step 1, 2, ..., in the order of training: the step that made version `step`.

    Raises ConfigError when the run has no such step.
    """
    batch, ledger = _batch_of(evidence, step), evidence.ledger
    return [_row(evidence, row, batch) for number in batch.groups for row in ledger.members.get(number, ())]


def demonstrations_of_step(evidence: Evidence, step: int) -> list[dict[str, Any]]:
    """The same of its demonstrations."""
    batch, data = _batch_of(evidence, step), evidence.demonstrations
    about = {"batch": batch.b, "version": batch.version, "fixed_at": batch.fixed_at, "finished_at": batch.finished_at}
    return [
        {"draw": r.draw, "row": r.row, "where": "" if data is None else data.chats.where(r.row), "digest": r.digest}
        | about
        for r in evidence.ledger.demonstrations.get(batch.serial, ())
    ]


def _batch_of(evidence: Evidence, step: int) -> BatchRow:
    applied = [batch for batch in evidence.ledger.line if batch.outcome == "applied"]
    batch = next((batch for batch in applied if batch.version_after == step), None)
    if batch is None:
        raise ConfigError(f"--step is {step}; the run has applied the training steps 1 to {len(applied)}.")
    return batch


def of_run(evidence: Evidence) -> list[dict[str, Any]]:
    """Every stored trajectory, in issue order; one row per use of it, one without a batch if there is none."""
    ledger = evidence.ledger
    batches: dict[int, list[BatchRow | None]] = {}
    for batch in ledger.line:
        for number in batch.groups:
            batches.setdefault(number, []).append(batch)
    return [
        _row(evidence, ledger.trajectories[key], batch)
        for key in sorted(ledger.trajectories)
        for batch in batches.get(key[0]) or [None]
    ]


def importance_weight(evidence: Evidence, row: TrajectoryRow, batch: BatchRow) -> float | None:
    """From the learner's newest list with this batch; None before the next checkpoint."""
    for done_list in reversed(evidence.lists):
        if evidence.ledger.batch_of(done_list.branch, batch.b) is batch and batch.b < len(done_list.done):
            weights = done_list.done[batch.b].weights.get(row.group, ())
            return weights[row.index] if row.index < len(weights) else None
    return None


def _row(evidence: Evidence, row: TrajectoryRow, batch: BatchRow | None) -> dict[str, Any]:
    group = evidence.ledger.groups[row.group]
    columns: dict[str, Any] = {
        "branch": group.branch,
        "group": row.group,
        "index": row.index,
        "attempt": row.attempt,
        "actor": row.actor,
        "task": group.task_id,
        "draw": group.draw,
        "state": group.state,
        "reason": group.reason,
        "batch": None,
        "version": None,
        "staleness": None,
        "importance_weight": None,
        "group_weight": group.weight,
        "replay_weight": None,
        "versions": [version for version, _ in row.versions],
        "version_tokens": [count for _, count in row.versions],
        "policy_tokens": row.policy_tokens,
        "tokens": row.tokens,
        "turns": row.turns,
        "reward": row.reward,
        "env": row.env,
        "stop_reason": row.stop_reason,
        "digest": row.digest,
        "payload": group.payload,
        "issued_at": _issued_at(evidence, row),
        "received_at": row.received_at,
        "fixed_at": None,
        "finished_at": None,
    }
    if batch is not None:
        weight = importance_weight(evidence, row, batch)
        age = batch.version - row.oldest
        columns |= {"batch": batch.b, "version": batch.version, "staleness": age, "importance_weight": weight}
        replayed = (one.weight for one in batch.replay.drawn if one.group == row.group)
        columns |= {"replay_weight": next(replayed, None)}
        columns |= {"fixed_at": batch.fixed_at, "finished_at": batch.finished_at}
    return columns


def _issued_at(evidence: Evidence, row: TrajectoryRow) -> float | None:
    """When the attempt that brought a trajectory was issued; None where the ledger lacks it."""
    attempts = evidence.ledger.attempts.get((row.group, row.index), ())
    return next((a.issued_at for a in attempts if a.attempt == row.attempt), None)


TYPES = {
    "int64": ("branch", "group", "index", "attempt", "draw", "batch", "version", "staleness", "policy_tokens", "tokens",
              "turns"),
    "float64": ("importance_weight", "group_weight", "replay_weight", "reward", "issued_at", "received_at", "fixed_at",
                "finished_at"),
    "string": ("actor", "task", "state", "reason", "env", "stop_reason", "digest"),
    "bool_": ("payload",),
    "int64s": ("versions", "version_tokens"),
}  # fmt: skip
"""Types of the columns of `of_run`, needed since a column may be empty."""


def write_parquet(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the rows as parquet. Raises ConfigError without pyarrow."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError("--format is parquet, which needs pyarrow: pip install 'asyncrl[parquet]'.") from error
    types = {name: kind for kind, names in TYPES.items() for name in names}
    kinds = {kind: getattr(pyarrow, kind)() for kind in TYPES if kind != "int64s"}
    kinds["int64s"] = pyarrow.list_(pyarrow.int64())
    schema = pyarrow.schema([(name, kinds[types[name]]) for name in rows[0]] if rows else [])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows), schema=schema), path)
