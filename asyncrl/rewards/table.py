"""The scores and wrappers that come with asyncrl, by the name that a config gives them."""

from __future__ import annotations

from asyncrl.rewards.isolation.processes import InProcesses
from asyncrl.rewards.score import Score
from asyncrl.rewards.scores.answers import exact_match, f1, gsm8k, json_schema, multiple_choice
from asyncrl.rewards.scores.code_tests import CodeTests
from asyncrl.rewards.scores.judge import Judge
from asyncrl.rewards.scores.mathematics import Math
from asyncrl.rewards.scores.reasoning_gym import reasoning_gym
from asyncrl.rewards.scores.reward_model import RewardModel
from asyncrl.rewards.wrappers import Batched, OverlongPenalty, RateLimited

REWARDS: dict[str, Score] = {
    "code_tests": CodeTests,
    "exact_match": exact_match,
    "f1": f1,
    "gsm8k": gsm8k,
    "json_schema": json_schema,
    "judge": Judge,
    "math": Math,
    "multiple_choice": multiple_choice,
    "reasoning_gym": reasoning_gym,
    "reward_model": RewardModel,
}
"""A function is the score itself, a class is made one with its options."""

WRAPPERS: dict[str, Score] = {
    "batched": Batched,
    "in_processes": InProcesses,
    "overlong_penalty": OverlongPenalty,
    "rate_limited": RateLimited,
}
"""Called with the score that they are put around, and their options."""
