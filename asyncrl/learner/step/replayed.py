"""Metrics of replayed groups: how many a batch has, how old they are, and how unequal their weights."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from asyncrl.buffer.client import BatchReply
from asyncrl.trajectory import Trajectory


def new_trajectories(reply: BatchReply) -> Sequence[Trajectory]:
    """Those of the whole batch's new groups: what the policy earns now. `reply` holds the whole batch."""
    replayed = dict(reply.replayed)
    return [t for t in reply.trajectories if t.id.group not in replayed] if replayed else reply.trajectories


def replay_metrics(reply: BatchReply) -> dict[str, float]:
    """Of a batch, the whole of which `reply` holds."""
    values = {"buffer/replay/groups": float(len(reply.replayed))}
    if not reply.replayed:
        return values
    oldest: dict[int, int] = {}
    for t in reply.trajectories:
        versions = min(int(row.versions[row.mask].min()) for row in t.rows if row.mask.any())
        oldest[t.id.group] = min(versions, oldest.get(t.id.group, versions))
    weights = [weight for _, weight in reply.replayed]
    values["buffer/replay/age"] = statistics.fmean(reply.version - oldest[group] for group, _ in reply.replayed)
    values["buffer/replay/ess"] = sum(weights) ** 2 / (len(weights) * sum(weight**2 for weight in weights))
    return values
