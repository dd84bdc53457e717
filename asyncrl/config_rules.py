"""What spans several fields of the configuration: what cannot work together, and what is probably not meant."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncrl.config import Config


def impossible(c: Config) -> list[str]:
    """What cannot work together: one sentence each, with field, value, expectation and remedy."""
    problems = []
    if c.weights.every > c.buffer.max_staleness + 1:
        problems.append(
            f"weights.every is {c.weights.every} but at most buffer.max_staleness + 1 = {c.buffer.max_staleness + 1} "
            "keeps data usable until the next publication: publish more often or raise buffer.max_staleness."
        )
    batch = c.learner.groups_per_step * c.learner.group_size
    if c.buffer.capacity < batch:
        problems.append(
            f"buffer.capacity is {c.buffer.capacity} trajectories but one batch holds learner.groups_per_step * "
            f"learner.group_size = {batch}: raise buffer.capacity to at least {batch}."
        )
    if c.learner.groups_per_step % c.learner.minibatches:
        problems.append(
            f"learner.minibatches is {c.learner.minibatches}, which does not divide learner.groups_per_step = "
            f"{c.learner.groups_per_step}: choose a divisor."
        )
    if c.learner.ranks > 1 and c.learner.backend == "torch":
        problems.append(
            f"learner.ranks is {c.learner.ranks} but learner.backend torch is one process: use learner.backend fsdp2."
        )
    if c.actors.max_new_tokens >= c.env.max_tokens:
        problems.append(
            f"actors.max_new_tokens is {c.actors.max_new_tokens} but a whole row may have env.max_tokens = "
            f"{c.env.max_tokens}: lower the former or raise the latter."
        )
    if not c.learner.unsafe:
        # Whether the user's own loss corrects itself is known once it is imported: the learner asks again.
        if ":" not in c.learner.loss and c.learner.loss not in SELF_CORRECTING and (problem := uncorrected(c)):
            problems.append(problem)
        if c.actors.top_p < 1 or c.actors.top_k > 0:
            problems.append(
                f"actors.top_p is {c.actors.top_p} and actors.top_k {c.actors.top_k}: truncated sampling makes the "
                "behaviour logprobs of engines disagree; use 1.0 and 0, or learner.unsafe: true."
            )
    return problems


SELF_CORRECTING = frozenset(("reinforce", "topr", "rollout_is", "dppo_tv", "dppo_kl"))
"""Losses whose ratio is against the policy that sampled the token, whatever `learner.proximal` and `corrections`."""


def uncorrected(c: Config) -> str | None:
    """Why a loss that does not correct itself must not be trained on stale data, or None when something else does."""
    if c.buffer.max_staleness == 0 or c.learner.unsafe:
        return None
    if c.learner.proximal == "behaviour":
        return (
            f"learner.proximal is behaviour while buffer.max_staleness is {c.buffer.max_staleness}: then every "
            "correction is 1, and the trust region is around a policy of the past. Use recompute and a correction, "
            f"or a loss that corrects itself ({', '.join(sorted(SELF_CORRECTING))}); learner.unsafe: true allows it."
        )
    if not any(x.get("name", "none") != "none" for x in c.learner.corrections):
        return (
            f"learner.corrections is empty while buffer.max_staleness is {c.buffer.max_staleness}: stale data needs an "
            "importance correction, for instance [{name: tis}], or a loss that corrects itself "
            f"({', '.join(sorted(SELF_CORRECTING))}); learner.unsafe: true trains without."
        )
    return None


def warnings(c: Config) -> list[str]:
    """What works but is probably not what was meant."""
    found = []
    full_overlap = 2 * c.weights.every - 1
    if 0 < c.buffer.max_staleness < full_overlap:
        found.append(
            f"buffer.max_staleness {c.buffer.max_staleness} is below 2 * weights.every - 1 = {full_overlap}: "
            "generation and training overlap only in part."
        )
    if c.learner.proximal == "approximate" and c.learner.minibatches == 1:
        found.append(
            "learner.proximal is approximate with learner.minibatches 1: the exact logprobs cost nothing then, and "
            "are used."
        )
    return found
