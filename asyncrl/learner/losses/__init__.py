"""Policy losses: the table of `learner.loss`, and the contract for a loss of your own.

Every loss is a function `(inputs: LossInputs, *, options) -> PolicyLoss`, readable beside its paper. With
r = exp(current - proximal), the log-ratio clamped to ±20, L is what is minimised. Aggregation to a scalar is separate
(`AGGREGATIONS`), and so is the correction for tokens that another policy sampled (`asyncrl.learner.corrections`).
docs/reference/algorithms.md says who uses which variant.
"""

from __future__ import annotations

from asyncrl.learner.losses.aggregation import AGGREGATIONS
from asyncrl.learner.losses.clipped import decoupled_ppo, gmpo, gspo, luspo, ppo, sapo
from asyncrl.learner.losses.covariance import clip_cov, kl_cov
from asyncrl.learner.losses.divergence import dppo_kl, dppo_tv
from asyncrl.learner.losses.policy_loss import Loss, LossInputs, LossProperties, PolicyLoss, loss, properties_of
from asyncrl.learner.losses.score import cispo, dro, gpg, reinforce, rollout_is, topr, vespo
from asyncrl.learner.losses.supervised import sft

__all__ = [
    "AGGREGATIONS",
    "LOSSES",
    "LossInputs",
    "LossProperties",
    "PolicyLoss",
    "loss",
    "properties_of",
]

LOSSES: dict[str, Loss] = {
    "ppo": ppo,
    "decoupled_ppo": decoupled_ppo,
    "gspo": gspo,
    "luspo": luspo,
    "gmpo": gmpo,
    "sapo": sapo,
    "cispo": cispo,
    "gpg": gpg,
    "reinforce": reinforce,
    "topr": topr,
    "rollout_is": rollout_is,
    "vespo": vespo,
    "dro": dro,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "sft": sft,
}
