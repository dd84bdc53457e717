"""Rules of `buffer.replay` that span several fields."""

from __future__ import annotations

import math

from asyncrl.config.tree import Tree

_ROUNDING = 1e-9
"""So that 0.29 of 100 groups are 29."""
_OF_DIFFERENCES = ("spread", "learnability")
"""Priorities that are 0 for a group of equal rewards."""


def most_replayed(c: Tree) -> int:
    """Used groups that a batch gets at most: `buffer.replay` of `learner.groups_per_step`, rounded down."""
    return math.floor(c.buffer.replay * c.learner.groups_per_step + _ROUNDING)


def of_replay(c: Tree) -> list[str]:
    """What a replay cannot work with, one sentence each."""
    b, problems = c.buffer, []
    if b.replay == 0:
        return []
    if b.max_uses < 2:
        problems.append(
            f"buffer.replay is {b.replay:g} and buffer.max_uses {b.max_uses}, so that no group may be used again: "
            "raise buffer.max_uses to at least 2, or set buffer.replay 0."
        )
    if b.most_staleness < 1:
        bound = "staleness_limit" if b.max_staleness == "auto" else "max_staleness"
        problems.append(
            f"buffer.replay is {b.replay:g} and buffer.{bound} {b.most_staleness}: a group that was used is at "
            f"least one version old. Raise buffer.{bound} to at least 1, or set buffer.replay 0."
        )
    if b.sampler != "fifo":
        problems.append(
            f"buffer.replay is {b.replay:g} and buffer.sampler {b.sampler}: beside replayed groups a batch takes new "
            "ones in issue order. Set buffer.sampler fifo, and choose what is replayed with buffer.replay_priority."
        )
    if not most_replayed(c):
        groups = c.learner.groups_per_step
        problems.append(
            f"buffer.replay is {b.replay:g} of learner.groups_per_step {groups}, which is less than one group: raise "
            f"buffer.replay to at least {1 / groups:.3g}, or set it to 0."
        )
    if c.learner.group_size == 1 and b.replay_priority in _OF_DIFFERENCES:
        problems.append(
            f"buffer.replay_priority is {b.replay_priority} and learner.group_size 1: one reward differs from no "
            "other, so that every priority is 0 and no group is replayed. Set buffer.replay_priority uniform."
        )
    return problems


def doubtful_replay(c: Tree) -> list[str]:
    """What a replay works with although it is probably not meant."""
    b, teacher = c.buffer, c.learner.teacher
    rewards_unread = bool(teacher.path) and teacher.reward_weight == 0
    if not (b.replay and rewards_unread and b.replay_priority in _OF_DIFFERENCES):
        return []
    return [
        f"buffer.replay_priority is {b.replay_priority} while learner.teacher.reward_weight is 0: groups are replayed "
        "by rewards that teach nothing, and those of equal rewards never are: replay_priority uniform goes by age."
    ]
