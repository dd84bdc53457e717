"""The scores and wrappers that come with asyncrl, by the name that a config gives them.

Entries are import paths, so that a name costs nothing until it is used.
"""

REWARDS: dict[str, str] = {
    "code_tests": "asyncrl.rewards.scores.code_tests:CodeTests",
    "exact_match": "asyncrl.rewards.scores.answers:exact_match",
    "f1": "asyncrl.rewards.scores.answers:f1",
    "gsm8k": "asyncrl.rewards.scores.answers:gsm8k",
    "json_schema": "asyncrl.rewards.scores.answers:json_schema",
    "judge": "asyncrl.rewards.scores.judge:Judge",
    "math": "asyncrl.rewards.scores.mathematics:Math",
    "multiple_choice": "asyncrl.rewards.scores.answers:multiple_choice",
    "reasoning_gym": "asyncrl.rewards.scores.reasoning_gym:reasoning_gym",
    "reward_model": "asyncrl.rewards.scores.reward_model:RewardModel",
}
"""A function is the score itself; a class is instantiated with its options."""

WRAPPERS: dict[str, str] = {
    "batched": "asyncrl.rewards.wrappers:Batched",
    "in_processes": "asyncrl.rewards.isolation.processes:InProcesses",
    "overlong_penalty": "asyncrl.rewards.wrappers:OverlongPenalty",
    "rate_limited": "asyncrl.rewards.wrappers:RateLimited",
}
"""Called with the score that they wrap, and their options."""

GROUP_SCORES: dict[str, str] = {"listwise_judge": "asyncrl.rewards.scores.listwise:ListwiseJudge"}
"""Scores of whole groups: see `group_score.py`."""
