"""Which used groups are replayed, how often and with what weight: against slow references."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import permutations
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.buffer.replaying import PRIORITIES, Replaying, draw, drawn, loss_weights, seed_of
from asyncrl.config import Config
from asyncrl.config.rules import warnings
from asyncrl.errors import ConfigError
from tests.buffer.test_choices import group

PRIORITY = st.floats(1e-6, 1e6)


def reference_chances(priorities: dict[int, float]) -> dict[int, Fraction]:
    """Exact, of a first draw."""
    total = sum(Fraction(p) for p in priorities.values())
    return {number: Fraction(p) / total for number, p in priorities.items()}


@given(st.dictionaries(st.integers(0, 50), PRIORITY, max_size=12), st.integers(0, 15), st.floats(0, 1), st.integers())
def test_chances_and_weights_equal_the_formulas(
    priorities: dict[int, float], most: int, beta: float, seed: int
) -> None:
    found = drawn(priorities, most, beta, Random(seed))
    exact = reference_chances(priorities)
    assert found.candidates == len(priorities)
    assert found == drawn(dict(reversed(priorities.items())), most, beta, Random(seed)), "the order is none of its"
    assert list(found.numbers) == sorted(set(found.numbers) & priorities.keys())
    assert len(found.drawn) == min(most, len(priorities)), "as many as there are, none twice"
    factors = {one.group: float(len(priorities) * exact[one.group]) ** -beta for one in found.drawn}
    for one in found.drawn:
        assert math.isclose(one.chance, float(exact[one.group]), rel_tol=1e-12)
        assert math.isclose(one.weight, factors[one.group] / max(factors.values()), rel_tol=1e-9)
    assert max((one.weight for one in found.drawn), default=1.0) == 1.0


def test_draws_are_in_proportion_among_those_that_are_left() -> None:
    priorities, most, times = {0: 1.0, 1: 2.0, 2: 5.0, 3: 0.5}, 2, 20_000
    exact: Counter[tuple[int, ...]] = Counter()
    for order in permutations(priorities, most):
        left, chance = dict(priorities), 1.0
        for number in order:
            chance *= left.pop(number) / (sum(left.values()) + priorities[number])
        exact[tuple(sorted(order))] += chance  # type: ignore[assignment]
    assert math.isclose(sum(exact.values()), 1.0)
    rng = Random(0)
    seen = Counter(drawn(priorities, most, 0.4, rng).numbers for _ in range(times))
    for pair, chance in exact.items():
        assert abs(seen[pair] / times - chance) < 4 * math.sqrt(chance * (1 - chance) / times), pair


@given(st.lists(PRIORITY, min_size=1, max_size=8))
def test_weights_are_all_one_without_beta_and_with_equal_priorities(chances: list[float]) -> None:
    assert loss_weights(chances, 0.0) == [1.0] * len(chances)
    assert loss_weights([chances[0]] * 5, 0.7) == [1.0] * 5
    assert all(0 < weight <= 1 for weight in loss_weights(chances, 1.0))


def test_priorities_are_what_their_names_say() -> None:
    solved_once = group(0, (0.0, 0.0, 0.0, 1.0))
    assert PRIORITIES["uniform"](solved_once) == 1.0
    assert math.isclose(PRIORITIES["spread"](solved_once), math.sqrt(3) / 4)
    assert PRIORITIES["learnability"](solved_once) == 3 / 16
    assert PRIORITIES["spread"](group(1, (1.0, 1.0))) == PRIORITIES["learnability"](group(1, (1.0, 1.0))) == 0


def replayed(groups: list[object], **settings: object) -> dict[int, float]:
    """Chance of every candidate."""
    rules = Replaying(99, **settings)  # type: ignore[arg-type]
    return {one.group: one.chance for one in draw(rules, groups, 4, Random(0)).drawn}  # type: ignore[arg-type]


def test_age_halves_a_priority_and_the_exponent_applies_to_both() -> None:
    fresh, old = group(0, (0.0, 1.0), oldest=4), group(1, (0.0, 1.0), oldest=0)
    spread = PRIORITIES["spread"]
    assert replayed([fresh, old], priority=spread) == {0: 0.5, 1: 0.5}
    aged = replayed([fresh, old], priority=spread, half_life=2.0)
    assert math.isclose(aged[1] / aged[0], 0.25)
    aged = replayed([fresh, old], priority=spread, half_life=2.0, exponent=0.5)
    assert math.isclose(aged[1] / aged[0], 0.5)
    wide = group(2, (0.0, 4.0), oldest=4)
    assert math.isclose(replayed([fresh, wide], priority=spread, exponent=2.0)[2], 16 / 17)


def test_what_cannot_teach_is_no_candidate() -> None:
    unweighted = group(2)
    unweighted.weight = 0.0
    groups = [group(0), group(1, (1.0, 1.0)), unweighted]
    assert replayed(groups, priority=PRIORITIES["spread"]) == {0: 1.0}
    assert replayed(groups, priority=PRIORITIES["spread"], exponent=0.0) == {0: 1.0}
    assert replayed(groups) == {0: 0.5, 1: 0.5}
    assert replayed([]) == {}


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_priority_that_is_no_number_is_named(value: float) -> None:
    with pytest.raises(ValueError, match=r"buffer\.replay_priority <lambda> gave .* for group 0, expected 0 to"):
        draw(Replaying(1, lambda _: value), [group(0)], 4, Random(0))


def test_every_batch_has_a_seed_of_its_own() -> None:
    seeds = {seed_of(data, branch, b) for data in range(3) for branch in range(3) for b in range(30)}
    assert len(seeds) == 270


def config(**buffer: object) -> Config:
    section = {"replay": 1.0, "max_uses": 2, "max_staleness": 2} | buffer
    return Config.model_validate({"buffer": section, "learner": {"groups_per_step": 10}})


def test_the_settings_come_from_the_config() -> None:
    assert Replaying.of(config(replay=0.0)) is None
    rules = Replaying.of(config(replay=0.29, replay_priority="learnability", replay_half_life=None, replay_beta=1.0))
    assert rules == Replaying(2, PRIORITIES["learnability"], 0.6, 1.0, None)
    assert Replaying.of(config(replay=0.7)) == Replaying(7, PRIORITIES["spread"], 0.6, 0.4, 2.0)
    with pytest.raises(ConfigError, match=r"buffer\.replay_priority: 'sprad' is not a known name"):
        Replaying.of(config(replay_priority="sprad"))


@pytest.mark.parametrize(
    ("buffer", "why"),
    [
        ({"max_uses": 1}, r"buffer\.replay is 1 and buffer\.max_uses 1, .*raise buffer\.max_uses to at least 2"),
        ({"max_staleness": 0}, r"buffer\.max_staleness 0: .*Raise buffer\.max_staleness to at least 1"),
        ({"sampler": "uniform"}, r"buffer\.sampler uniform: .*Set buffer\.sampler fifo"),
        ({"replay": 0.05}, r"buffer\.replay is 0\.05 of learner\.groups_per_step 10, .*at least 0\.1"),
        ({"replay_beta": 1.5}, "replay_beta"),
    ],
)
def test_what_a_replay_cannot_work_with_is_a_config_error(buffer: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        config(**buffer)
    if "replay_beta" not in buffer:
        config(**{**buffer, "replay": 0.0})


@pytest.mark.parametrize("priority", ["spread", "learnability"])
def test_one_answer_per_group_has_no_priority_by_differences(priority: str) -> None:
    """Every group would have the priority 0, and nothing would be replayed."""
    assert PRIORITIES[priority](group(0, (1.0,))) == 0
    values: dict[str, Any] = {
        "buffer": {"replay": 1.0, "replay_priority": priority, "max_uses": 2, "max_staleness": 2},
        "learner": {"group_size": 1, "advantage": "gae", "critic": "separate"},
    }
    with pytest.raises(ValueError, match=rf"replay_priority is {priority} and learner\.group_size 1: .*Set .* uniform"):
        Config.model_validate(values)
    values["buffer"]["replay_priority"] = "uniform"
    assert Config.model_validate(values).buffer.replay == 1


@pytest.mark.parametrize(("priority", "reward_weight", "said"), [
    ("spread", 0.0, 1), ("learnability", 0.0, 1), ("uniform", 0.0, 0), ("spread", 0.5, 0),
])  # fmt: skip
def test_a_priority_by_rewards_that_teach_nothing_is_warned_of(priority: str, reward_weight: float, said: int) -> None:
    c = Config.model_validate(
        {
            "buffer": {"replay": 1.0, "replay_priority": priority, "max_uses": 2, "max_staleness": 2},
            "learner": {"teacher": {"path": "quickstart", "reward_weight": reward_weight}},
        }
    )
    assert len([text for text in warnings(c) if "replay_priority uniform goes by age" in text]) == said
