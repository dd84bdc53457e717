"""The held-out set, played by the actors on one policy version: opened, waited for, made into numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.buffer.client import EvalResult
from asyncrl.trajectory import succeeded


@dataclass(frozen=True, slots=True)
class Success:
    """Share of held-out episodes that succeeded."""

    episodes: int
    share: float


def success(results: Sequence[EvalResult], *, greedy: bool, reward: str) -> Success | None:
    """Of the greedy episodes, or of those sampled at the training temperature; None when there are none.

    `reward`: the one that says so (`eval.success`).
    """
    solved = [succeeded(r.reward, r.rewards, reward) for r in results if r.greedy == greedy]
    return Success(len(solved), statistics.fmean(solved)) if solved else None


def held_out(results: Sequence[EvalResult], *, reward: str) -> tuple[dict[str, float], dict[str, float]]:
    """As series, and as the fields of the event: shares and episodes, sampled and greedy."""
    values: dict[str, float] = {}
    counts: dict[str, float] = {}
    for how, greedy in (("sampled", False), ("greedy", True)):
        found = success(results, greedy=greedy, reward=reward)
        if found is not None:
            values[f"reward/held_out_success_{how}"] = found.share
            counts |= {how: found.share, f"{how}_episodes": found.episodes}
    return values, counts
