"""What a whole evaluation has measured, from its results. Pure; the audit computes it again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.config.held_out import HeldOutSet
from asyncrl.errors import RunError
from asyncrl.success import Success, success

WAYS = {"sampled": False, "greedy": True}
"""By name of the way of sampling: whether it is greedy."""


@dataclass(frozen=True, slots=True)
class Result:
    task_id: str
    reward: float
    rewards: Mapping[str, float]


def measures(rows: Iterable[tuple[Any, ...]], held_out: HeldOutSet) -> dict[str, Success]:
    """Success by way of sampling, without those whose episodes all failed.

    rows: (task_id, greedy, reward, rewards as JSON, digest) of each result, in order; an empty digest: it failed.
    """
    results: dict[str, list[Result | None]] = {way: [] for way in WAYS}
    for task_id, greedy, reward, rewards, digest in rows:
        result = Result(task_id, reward, json.loads(rewards)) if digest else None
        results["greedy" if greedy else "sampled"].append(result)
    measured = {}
    for way, of_way in results.items():
        try:
            measured[way] = success(of_way, held_out.success, held_out.pass_at)
        except RunError:
            continue  # every episode failed, or none was played
    return measured


def row_of(measured: Success) -> tuple[Any, ...]:
    """The columns that the ledger keeps behind the key."""
    m = measured
    passes = json.dumps({str(k): share for k, share in m.pass_at.items()})
    return (m.share, m.low, m.high, m.tasks, m.episodes, m.failed, m.reward, m.reward_half, passes)


def of_row(row: tuple[Any, ...]) -> Success:
    """The inverse of `row_of`."""
    share, low, high, tasks, episodes, failed, reward, reward_half, passes = row
    pass_at = {int(k): share for k, share in json.loads(passes).items()}
    return Success(share, low, high, tasks, episodes, failed, reward, reward_half, pass_at)
