"""Scores of a policy's text, and wrappers around them."""

from __future__ import annotations

from asyncrl.rewards.score import Score, Scored, call, run_score
from asyncrl.rewards.spec import ScoreSpec, build, check, parse
from asyncrl.rewards.table import REWARDS, WRAPPERS
from asyncrl.rewards.wrappers import Weighted

__all__ = [
    "REWARDS",
    "WRAPPERS",
    "Score",
    "ScoreSpec",
    "Scored",
    "Weighted",
    "build",
    "call",
    "check",
    "parse",
    "run_score",
]
