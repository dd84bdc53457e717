"""Staleness as a hard bound: the formulas of docs/explanation/buffer.md as pure functions.

v is the learner's version when a batch is fixed, p the latest version published on the branch, S = max_staleness. The
bound is checked on stored versions, never on counters, so that no restart can loosen it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from asyncrl.buffer.ledger.group import Group

OverAge = Literal["drop", "wait", "mask"]
Verdict = Literal["eligible", "ahead", "over_age"]


def admits(in_flight: int, waiting: int, in_batches: int, max_staleness: int, groups_per_step: int) -> bool:
    """Whether a ticket of a new group may be issued.

    waiting: groups not used yet. in_batches: groups whose first use is in a batch fixed at a version >= p that is open
    or applied. Everything generated from now on is at least of version p; (S + 1) steps later it would be too old, and
    until then the learner takes (S + 1) * groups_per_step groups.

    >>> admits(in_flight=4, waiting=2, in_batches=1, max_staleness=1, groups_per_step=4)
    True
    >>> admits(in_flight=4, waiting=2, in_batches=2, max_staleness=1, groups_per_step=4)
    False
    """
    return in_flight + waiting + in_batches < (max_staleness + 1) * groups_per_step


def staleness(group: Group, version: int) -> int:
    """Staleness of the group's oldest stored policy token; 0 while nothing is stored."""
    oldest = group.oldest
    return 0 if oldest is None else version - oldest


def verdict(group: Group, version: int, max_staleness: int, over_age: OverAge, mask_min_kept: float = 0.0) -> Verdict:
    """Whether a group with these stored tokens may be trained at `version`.

    ahead: it holds a token of a version that the learner, which is redoing recorded batches, has not reached yet.
    over_age: it is too old for good. Under `mask` tokens past the bound carry no loss, so only the rest counts.
    """
    newest = group.newest
    if newest is not None and newest > version:
        return "ahead"
    if staleness(group, version) <= max_staleness:
        return "eligible"
    if over_age != "mask":
        return "over_age"
    if not group.complete:
        return "eligible"  # judged when it is complete: the missing tokens will be fresh
    kept = group.policy_tokens(since=version - max_staleness)
    return "eligible" if kept and kept >= mask_min_kept * group.policy_tokens() else "over_age"


def last_version(group: Group, min_versions: Sequence[int], max_staleness: int) -> float:
    """The highest version at which a live unused group still meets the bound; infinite while nothing ties it to one.

    `min_versions` are those of the group's leased tickets.
    """
    versions = min_versions if group.oldest is None else [group.oldest, *min_versions]
    return min(versions, default=math.inf) + max_staleness


def due(
    deadlines: Sequence[tuple[float, Group]], version: int, max_staleness: int, groups_per_step: int
) -> list[Group]:
    """Under `wait`: the groups that the batch for `version` must hold so that none of them ever exceeds the bound.

    `deadlines` holds each live unused group with its last version.
    For every k = 0..S at least (groups with last version <= v + k) - k * groups_per_step of those groups, earliest
    deadline first, never more than fit.
    """
    ordered = sorted(deadlines, key=lambda deadline: (deadline[0], deadline[1].number))
    must = must_hold([last for last, _ in ordered], version, max_staleness, groups_per_step)
    return [group for _, group in ordered[: min(must, groups_per_step)]]


def must_hold(lasts: Sequence[float], version: int, max_staleness: int, groups_per_step: int) -> int:
    """How many groups with these last versions the batch for `version` must hold; more than fit: some are too late."""
    steps = range(max_staleness + 1)
    return max(0, *(sum(last <= version + k for last in lasts) - k * groups_per_step for k in steps))
