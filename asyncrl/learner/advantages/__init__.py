"""Advantage estimators: the table of `learner.advantage`, and the contract for one of your own.

Every estimator is a function `(inputs: EstimatorInputs, *, options) -> Advantages`. R is an episode's reward (the sum
over all its rows), G the size of its group. Two rules hold for the group-relative ones unless an option says otherwise:
a group of one has A = 0 (`singleton: reward` gives A = R), and a group whose rewards are all equal has exactly 0
(before any whitening over the batch). All tokens of all rows of an episode share their advantage; estimators with a
value per token are in `returns.py` and `token_baseline.py`, those with one per turn in `by_turn.py` and `gigpo.py`.
"""

from __future__ import annotations

from asyncrl.learner.advantages.by_turn import turn_gae, turn_grpo, turn_returns
from asyncrl.learner.advantages.estimator import Advantages, Estimator, EstimatorInputs, estimator, needs_of
from asyncrl.learner.advantages.gigpo import gigpo
from asyncrl.learner.advantages.group_baselines import gdpo, gpg, grpo_passk, max_rl, opo, reinforce_pp_baseline
from asyncrl.learner.advantages.grpo import dr_grpo, grpo, rloo
from asyncrl.learner.advantages.returns import gae, reinforce_pp, remax, vapo_gae, vtrace
from asyncrl.learner.advantages.token_baseline import optimal_token_baseline

__all__ = ["ESTIMATORS", "Advantages", "EstimatorInputs", "estimator", "needs_of"]

ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": opo,
    "gpg": gpg,
    "grpo_passk": grpo_passk,
    "max_rl": max_rl,
    "gdpo": gdpo,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "reinforce_pp": reinforce_pp,
    "remax": remax,
    "gae": gae,
    "vapo_gae": vapo_gae,
    "vtrace": vtrace,
    "optimal_token_baseline": optimal_token_baseline,
    "turn_returns": turn_returns,
    "turn_grpo": turn_grpo,
    "turn_gae": turn_gae,
    "gigpo": gigpo,
}
