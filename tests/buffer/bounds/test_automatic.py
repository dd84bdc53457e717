"""The automatic bound: what it costs, when it is raised, lowered and left; and that the limits hold."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from asyncrl.buffer.bounds.automatic import BARRED, CALM, LOOKED_AT, Auto, decision, in_force, target_after
from asyncrl.buffer.ledger.records import Decision, Measures, Tuned
from asyncrl.config import Config
from asyncrl.errors import ConfigError

AUTO = Auto(least=0, limit=8, start=2)


@dataclass
class FakeBatch:
    bound: int
    measures: Measures | None
    decision: Decision | None = None
    tuned: Tuned | None = None


def measures(cost: float = 0.0, ess: float = 1.0, lr: float = 0.0) -> Measures:
    return Measures(waited=cost, idle=1.0, stale=0.0, ess=ess, lr=lr)


def played(auto: Auto, *costs: float | Measures | None) -> list[FakeBatch]:
    """A line of batches that cost so much, each with its decision; nobody is waiting."""
    line: list[FakeBatch] = []
    for cost in costs:
        made = line[-1].decision if line else None
        bound = auto.start if made is None else made.bound
        line.append(FakeBatch(bound, measures(cost) if isinstance(cost, float) else cost))
        line[-1].decision = decision(auto, line, len(line), None, True)
    return line


def targets(auto: Auto, *costs: float | Measures | None) -> list[int]:
    return [batch.decision.target for batch in played(auto, *costs) if batch.decision is not None]


def test_it_is_raised_where_the_bound_costs_throughput() -> None:
    """The first batch of the run and the first after a change say nothing."""
    assert targets(AUTO, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5) == [2, 4, 4, 8, 8, 8]


def test_a_single_batch_must_say_it_clearly() -> None:
    assert targets(AUTO, 0.0, 0.03, 0.03) == [2, 2, 4]


def test_it_is_lowered_half_way_where_it_costs_nothing() -> None:
    free = (0.0,) * (CALM + 1)
    assert targets(AUTO, *free, *free)[:: CALM + 1] == [2, 0]
    assert targets(AUTO, *free, *free)[-1] == 0


def test_a_value_that_cost_too_much_is_barred_for_a_time_that_doubles() -> None:
    """2 costs nothing, 0 and 1 cost half: it tries them, and goes back to what it had."""

    def line_of(steps: int) -> list[int]:
        line: list[FakeBatch] = []
        for _ in range(steps):
            made = line[-1].decision if line else None
            bound = AUTO.start if made is None else made.target
            line.append(FakeBatch(bound, measures(0.0 if bound >= 2 else 0.5)))
            line[-1].decision = decision(AUTO, line, len(line), None, True)
        return [batch.bound for batch in line]

    held = line_of(8 * BARRED)
    tries = [n for n in range(1, len(held)) if held[n] < held[n - 1]]
    assert held[tries[0]] == 0
    assert {held[n] for n in tries[1:]} == {1}
    apart = [b - a for a, b in itertools.pairwise(tries[1:])]
    assert apart[1] >= 2 * BARRED > apart[0] >= BARRED
    assert sum(bound < 2 for bound in held) < 0.05 * len(held)


@pytest.mark.parametrize("skipped", [None, 1, 3])
def test_a_batch_that_was_given_up_changes_nothing(skipped: int | None) -> None:
    costs: list[float | None] = [0.0, 0.5, 0.5, 0.5]
    if skipped is not None:
        costs[skipped] = None
    assert targets(AUTO, *costs)[-1] == (8 if skipped is None else 4)


def test_it_is_not_raised_where_the_effective_sample_size_is_low_and_lowered_below() -> None:
    low, too_low = Measures(0.5, 1.0, 0.0, 0.85, 0.0), Measures(0.5, 1.0, 0.0, 0.6, 0.0)
    assert targets(AUTO, low, low, low, low) == [2, 2, 2, 2]
    assert targets(AUTO, too_low, too_low, too_low, too_low) == [2, 1, 1, 0]


@pytest.mark.parametrize(("changed", "to"), [(Measures(0.0, 1.0, 0.0, 0.4, 0.0), 1), (measures(0.2), 4)])
def test_a_drift_after_a_long_calm_is_answered_within_the_batches_that_count(changed: Measures, to: int) -> None:
    """The bound is 2; a floor that is barred keeps it there."""
    calm = measures(0.01)
    line = played(AUTO, *(calm,) * 300)
    assert {batch.decision.target for batch in line if batch.decision} == {2}
    made = None
    for _ in range(8):
        line.append(FakeBatch(2, changed))
        made = line[-1].decision = decision(AUTO, line, len(line), None, True)
        if made.target != 2:
            break
    assert made is not None
    assert made.target == to
    assert "over the last 8 batches" in made.why


def test_after_a_fixed_bound_the_larger_one_holds_until_its_groups_are_gone() -> None:
    fixed = FakeBatch(8, None)
    begun = in_force(AUTO, fixed)
    assert (begun.target, begun.bound) == (2, 8)
    assert in_force(Auto(0, 4, 2), fixed).bound == 4
    assert in_force(AUTO, FakeBatch(0, None)).bound == 2
    line = [fixed, FakeBatch(8, measures(0.01))]
    made = line[-1].decision = decision(AUTO, line, 40, 37, True)
    assert (made.target, made.bound, made.since) == (2, 8, 40)
    line.append(FakeBatch(8, measures(0.01)))
    assert decision(AUTO, line, 44, 39, True).bound == 8
    assert decision(AUTO, line, 44, 40, True).bound == 2


def test_learning_rate_times_bound_stays_under_its_limit() -> None:
    auto = Auto(least=1, limit=8, start=4, staleness_lr=1e-5)
    found = played(auto, measures(0.0, lr=5e-6), measures(0.0, lr=1e-6), measures(0.0, lr=1.0))
    assert [batch.decision.target for batch in found if batch.decision] == [2, 2, 1]
    assert "learning rate times bound at most 1e-05" in found[0].decision.why  # type: ignore[union-attr]
    assert found[1].decision.why == ""  # type: ignore[union-attr]


def test_stale_groups_are_lost_generation_and_count_only_while_the_learner_waits() -> None:
    stale = Measures(waited=0.4, idle=0.0, stale=0.3, ess=1.0, lr=0.0)
    assert targets(AUTO, stale, stale)[-1] == 4
    busy = Measures(waited=0.0, idle=0.0, stale=0.3, ess=1.0, lr=0.0)
    assert targets(AUTO, busy, busy)[-1] == 2


def test_what_is_decided_does_not_depend_on_batches_long_ago() -> None:
    costs = [0.5 if n % 7 == 0 else 0.001 * (n % 5) for n in range(LOOKED_AT + 100)]
    line = played(AUTO, *costs)
    assert target_after(AUTO, line) == target_after(AUTO, line[-LOOKED_AT - 1 :])


def test_a_smaller_bound_holds_for_batches_once_the_groups_admitted_before_are_gone() -> None:
    line = played(AUTO, *(0.0,) * CALM)
    line.append(FakeBatch(2, measures(0.0)))
    made = line[-1].decision = decision(AUTO, line, 40, 37, True)
    assert (made.target, made.bound, made.since) == (0, 2, 40)
    line.append(FakeBatch(2, measures(0.0)))
    assert decision(AUTO, line, 44, 39, True).bound == 2
    assert decision(AUTO, line, 44, 40, True).bound == 0
    assert decision(AUTO, line, 44, None, True).bound == 0
    assert decision(AUTO, line, 44, None, False).bound == 2, "under wait, a group would be too late"


def test_the_limits_follow_from_the_configuration() -> None:
    assert Auto.of(Config()) is None
    sections = {"buffer": {"max_staleness": "auto"}, "weights": {"every": 3}}
    assert Auto.of(Config.model_validate(sections)) == Auto(2, 8, 5)
    replayed = {"buffer": {"max_staleness": "auto", "replay": 0.5, "max_uses": 2, "staleness_limit": 4}}
    assert Auto.of(Config.model_validate(replayed)) == Auto(1, 4, 1)


def test_a_cadence_above_the_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weights.every is 4 but at most buffer.staleness_limit \+ 1 = 3"):
        Config.load("quickstart", {"buffer.max_staleness": "auto", "buffer.staleness_limit": 2, "weights.every": 4})
