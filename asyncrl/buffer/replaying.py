"""Replay: which used groups a batch gets beside its new ones, and how much each counts in the loss. Pure.

    candidates   used groups that a batch may hold, with a priority above 0
    p_g          priority_g^exponent over its sum: the chance that the first draw takes group g
    drawn        without replacement, every draw in proportion to p_g among those that are left
    w_g          (N p_g)^-beta over its largest among the drawn, N the number of candidates; of new groups it is 1

A priority is a function of the group, of columns of the ledger alone, so that the audit draws again. `PRIORITIES` names
those that come with asyncrl; `buffer.replay_priority` also takes an import path. All of it is computed in float64.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

from asyncrl.buffer.ledger.group import Group
from asyncrl.buffer.ledger.records import Draw, Drawn
from asyncrl.config import Config
from asyncrl.config.rules.replay import most_replayed
from asyncrl.errors import ConfigError
from asyncrl.plugins import resolve

Priority = Callable[[Group], float]
_LARGEST = 1e30
"""Largest priority: raised to the largest exponent it is still a float."""


def uniform(group: Group) -> float:
    """The same for all."""
    return 1.0


def spread(group: Group) -> float:
    """Standard deviation of the rewards in the group: the size of its advantages."""
    return statistics.pstdev(group.rewards)


def learnability(group: Group) -> float:
    """p (1 - p), where p is the share of the group's rewards that are 1 or more: 0 for a task that is always or never
    solved, largest for one that is solved half of the time."""
    p = sum(reward >= 1 for reward in group.rewards) / len(group.rewards)
    return p * (1 - p)


PRIORITIES: dict[str, Priority] = {"uniform": uniform, "spread": spread, "learnability": learnability}


@dataclass(frozen=True, slots=True)
class Replaying:
    """The settings of `buffer.replay`."""

    most: int
    """Used groups of one batch, at most."""
    priority: Priority = uniform
    exponent: float = 1.0
    beta: float = 0.0
    half_life: float | None = None
    """Versions of age that halve a priority; None: age does not count."""

    @classmethod
    def of(cls, c: Config) -> Replaying | None:
        """None: replay is off. Raises ConfigError for an unknown priority."""
        most = most_replayed(c)
        if not most:
            return None
        b = c.buffer
        try:
            priority = resolve(b.replay_priority, PRIORITIES, "buffer.replay_priority")
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return cls(most, priority, b.replay_exponent, b.replay_beta, b.replay_half_life)


def draw(rules: Replaying, groups: Iterable[Group], version: int, rng: Random) -> Draw:
    """Draws at most `rules.most` of the used `groups`, fewer where there are fewer with a priority above 0.

    Args:
        groups: the used groups that a batch for `version` may hold, in any order.
        rng: seeded by the batch (`seed_of`).
    Raises ValueError for a priority that is negative or no number.
    """
    priorities = {group.number: _prioritised(rules, group, version) for group in groups}
    return drawn(priorities, rules.most, rules.beta, rng)


def drawn(priorities: dict[int, float], most: int, beta: float, rng: Random) -> Draw:
    """The draw among groups, by number, whose priorities already have their exponent.

    Every candidate gets an arrival time, exponential with its priority as the rate, and the first `most` are taken:
    each is then the next of those that are left with a chance in proportion to its priority.
    """
    positive = {number: priorities[number] for number in sorted(priorities) if priorities[number] > 0}
    total = math.fsum(positive.values())
    chances = {number: priority / total for number, priority in positive.items()}
    chances = {number: chance for number, chance in chances.items() if chance > 0}
    arrivals = [(-math.log(1.0 - rng.random()) / chance, number) for number, chance in chances.items()]
    taken = sorted(number for _, number in sorted(arrivals)[:most])
    weights = loss_weights([chances[number] for number in taken], beta)
    return Draw(
        len(chances),
        tuple(Drawn(number, chances[number], weight) for number, weight in zip(taken, weights, strict=True)),
    )


def loss_weights(chances: Sequence[float], beta: float) -> list[float]:
    """(N p)^-beta over its largest, for each p of `chances`: N cancels.

    >>> loss_weights([0.5, 0.125], 0.5), loss_weights([0.3, 0.3], 0.7)
    ([0.5, 1.0], [1.0, 1.0])
    """
    least = min(chances, default=1.0)
    return [(least / chance) ** beta for chance in chances]


def seed_of(data_seed: int, branch: int, b: int) -> str:
    """The seed of batch b's draw, for `random.Random`."""
    return f"{data_seed}/{branch}/{b}/replay"


def _prioritised(rules: Replaying, group: Group, version: int) -> float:
    """The group's priority, halved by its age, with its exponent; 0 for one that is trained with advantage 0."""
    if group.weight == 0:
        return 0.0
    priority = rules.priority(group)
    if not 0 <= priority <= _LARGEST:
        name = getattr(rules.priority, "__name__", repr(rules.priority))
        raise ValueError(
            f"buffer.replay_priority {name} gave {priority} for group {group.number}, expected 0 to {_LARGEST:g}."
        )
    if rules.half_life is not None:
        priority *= 0.5 ** (max(0, version - (group.oldest or 0)) / rules.half_life)
    return float(priority**rules.exponent) if priority > 0 else 0.0
