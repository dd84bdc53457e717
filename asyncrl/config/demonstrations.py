"""What `data.demonstrations` and `learner.loss: sft` mean for the other fields. Pure."""

from __future__ import annotations

from asyncrl.config.held_out import held_out_sets
from asyncrl.config.tree import Tree

SFT = "sft"
"""The loss under which a batch holds demonstrations and no groups."""


def supervised(c: Tree) -> bool:
    """Whether the run trains on demonstrations alone."""
    return c.learner.loss == SFT


def groups_per_step(c: Tree) -> int:
    """Groups in one batch."""
    return 0 if supervised(c) else c.learner.groups_per_step


def demonstrations_per_step(c: Tree) -> int:
    """Demonstrations in one batch."""
    return c.learner.demonstrations.per_step if c.data.demonstrations else 0


def of_demonstrations(c: Tree) -> list[str]:
    """What is impossible about them: one sentence each."""
    return _supervised(c) + _idle(c) if supervised(c) else []


def _supervised(c: Tree) -> list[str]:
    learner, problems = c.learner, []
    if not c.data.demonstrations:
        problems.append(
            "learner.loss is sft and data.demonstrations empty: name the chats to train on, a file with one JSON "
            "object per line (docs/how-to/sft.md)."
        )
    if learner.demonstrations.per_step % learner.minibatches:
        problems.append(
            f"learner.minibatches is {learner.minibatches}, which does not divide learner.demonstrations.per_step = "
            f"{learner.demonstrations.per_step}: choose a divisor."
        )
    if c.actors.temperature != 1:
        problems.append(
            f"actors.temperature is {c.actors.temperature:g} and learner.loss sft: the learner divides its logits by "
            "it, and cross entropy has none. Set it to 1; eval.sets can give held-out sets one of their own."
        )
    without_effect = {
        "learner.teacher.path": bool(learner.teacher.path),
        "learner.critic": learner.critic != "none",
        "learner.kl_coef": learner.kl_coef > 0,
        "learner.pf_ppo": learner.pf_ppo != "off",
        "learner.greedy_baseline": learner.greedy_baseline,
        "learner.shaping": bool(learner.shaping),
        "learner.advantage_by_env": bool(learner.advantage_by_env),
        "learner.ess_lr": learner.ess_lr != "off",
        "learner.min_ess": learner.min_ess > 0,
    }
    if given := [field for field, is_set in without_effect.items() if is_set]:
        problems.append(
            f"learner.loss is sft, and {' and '.join(given)} {'is' if len(given) == 1 else 'are'} set, which "
            "demonstrations have no use for: they have no rewards and were not sampled. Leave it out."
        )
    return problems


def _idle(c: Tree) -> list[str]:
    """Actors play nothing but evaluations under sft."""
    sets = [each.name for each in held_out_sets(c)]
    if sets and c.actors.count == 0:
        return [
            f"learner.loss is sft with actors.count 0, and nobody would play the held-out sets ({', '.join(sets)}): "
            "set eval.tasks 0, or actors.count to 1 or more."
        ]
    if c.actors.count and not sets:
        return [
            f"learner.loss is sft, actors.count is {c.actors.count} and eval.tasks 0: actors would have nothing to "
            "play. Set actors.count 0, or eval.tasks."
        ]
    return []
