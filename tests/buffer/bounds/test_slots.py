"""Tuned slots: what is needed, when more or fewer are tried, what is undone; and that the limits hold."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.buffer.bounds.automatic import BARRED, CALM, LOOKED_AT
from asyncrl.buffer.bounds.slots import MOST, SlotLimits, slots_after
from asyncrl.buffer.ledger.records import Decision, Measures, Tuned
from asyncrl.config import Config

LIMITS = SlotLimits(least=1, most=128, start=16)


@dataclass
class FakeBatch:
    measures: Measures | None
    decision: Decision | None = None
    tuned: Tuned | None = None
    bound: int = 2


def measures(waited: float, idle: float = 0.0, seconds: float = 1.0) -> Measures:
    return Measures(waited, idle, 0.0, 1.0, 0.0, seconds)


def played(limits: SlotLimits, of: Callable[[int], Measures | None], steps: int) -> list[int]:
    """The slots of each batch, where a batch under n slots measures `of(n)`."""
    line: list[FakeBatch] = []
    held = []
    for _ in range(steps):
        made = line[-1].tuned if line else None
        held.append(limits.start if made is None else made.slots)
        line.append(FakeBatch(of(held[-1])))
        line[-1].tuned = Tuned(*_with_lent(slots_after(limits, line)))
    return held


def _with_lent(found: tuple[int, str]) -> tuple[int, int, str]:
    return found[0], 0, found[1]


def linear(need: int) -> Callable[[int], Measures]:
    """A learner that takes a second, and slots of which `need` make a batch in that time."""

    def of(slots: int) -> Measures:
        seconds = max(1.0, need / slots)
        return measures(1 - 1 / seconds, max(0.0, 1 - need / slots), seconds)

    return of


def test_from_few_slots_it_reaches_what_is_needed_in_a_few_batches() -> None:
    held = played(SlotLimits(1, 128, 1), linear(40), 20)
    assert held[0] == 1
    assert 40 <= held[8] <= 64
    assert set(held[8:]) == {held[8]}


def test_a_change_is_at_most_a_fourfold_one_and_needs_a_batch_under_the_former() -> None:
    held = played(SlotLimits(1, 128, 2), linear(128), 8)
    assert held[:6] == [2, 2, 8, 8, 32, 32]
    assert MOST == 4


def test_from_many_slots_it_comes_down_by_halves_where_the_learner_does_not_wait() -> None:
    held = played(SlotLimits(1, 128, 128), linear(10), 40)
    assert held[CALM + 1] == 64
    assert held[-1] <= 16
    assert held[-1] >= 10


def test_what_brings_batches_no_sooner_is_undone_and_barred_for_a_time_that_doubles() -> None:
    """An engine that is busy: the learner waits, whatever the slots are."""
    held = played(LIMITS, lambda _: measures(0.5), 8 * BARRED)
    ups = [n for n in range(1, len(held)) if held[n] > held[n - 1]]
    assert {*held} == {16, 40}
    assert [held[n + CALM + 1] for n in ups[:3]] == [16] * 3
    apart = [b - a for a, b in itertools.pairwise(ups)]
    assert BARRED <= apart[0] < apart[1]
    assert apart[1] >= 2 * BARRED


def test_a_return_is_not_judged_as_a_change() -> None:
    """Fewer slots made the learner wait. Those before are neither more slots that bring nothing, nor left again."""
    slower = {128: measures(0.0, 0.5), 80: measures(0.1, 0.3)}
    held = played(SlotLimits(1, 128, 128), lambda n: slower.get(n, measures(0.0, 0.5)), BARRED)
    assert held[: CALM + 1] == [128] * (CALM + 1)
    assert held[CALM + 1] == 80
    assert set(held[CALM + 4 :]) == {128}


def test_slots_that_admission_leaves_idle_call_for_another_bound_and_not_for_more_slots() -> None:
    assert set(played(LIMITS, lambda _: measures(0.4, 0.6), 12)) == {16}


def test_while_the_bound_changes_nothing_is_lowered_and_the_batch_after_it_does_not_count() -> None:
    calm = [FakeBatch(measures(0.0, 0.5), Decision(2, 2, 0, ""), Tuned(16, 0, "")) for _ in range(CALM + 1)]
    assert slots_after(LIMITS, calm)[0] == 10
    calm[-1].decision = Decision(1, 2, 0, "fresher")
    assert slots_after(LIMITS, calm) == (16, "")
    calm.append(FakeBatch(measures(0.9)))
    assert slots_after(LIMITS, calm) == (16, "")


@pytest.mark.parametrize("skipped", [0, 1])
def test_a_batch_that_was_given_up_changes_nothing(skipped: int) -> None:
    seen = [measures(0.9), measures(0.9)]
    line = [FakeBatch(None if n == skipped else m, tuned=Tuned(16, 0, "")) for n, m in enumerate(seen)]
    assert slots_after(LIMITS, line) == (
        (64, "the learner waits 90% of the time and slots are idle for 0%") if skipped == 0 else (16, "")
    )


def test_the_reason_names_the_limits_where_they_decide() -> None:
    line = [FakeBatch(measures(0.9), tuned=Tuned(16, 0, "")), FakeBatch(measures(0.9))]
    number, why = slots_after(SlotLimits(1, 20, 16), line)
    assert number == 20
    assert why.endswith("the limits are 1 to 20")


shares = st.floats(0, 1)


@given(st.lists(st.tuples(shares, shares, st.floats(0, 1e9)), min_size=1, max_size=40), st.integers(1, 9))
def test_the_limits_hold_whatever_is_measured(seen: list[tuple[float, float, float]], least: int) -> None:
    limits, line = SlotLimits(least, 64, 16), []
    for waited, idle, seconds in seen:
        line.append(FakeBatch(measures(waited, idle, seconds)))
        number, why = slots_after(limits, line)
        before = line[-2].tuned.slots if len(line) > 1 and line[-2].tuned else 16
        line[-1].tuned = Tuned(number, 0, why)
        assert least <= number <= 64
        assert (number == before) == (why == "")


def test_what_is_decided_does_not_depend_on_batches_long_ago() -> None:
    line = [FakeBatch(measures(0.5), tuned=Tuned(16, 0, "")) for _ in range(LOOKED_AT + 200)]
    for batch in line[:150]:
        batch.tuned = Tuned(7, 0, "")
    short = line[-LOOKED_AT - 1 :]
    assert slots_after(LIMITS, line) == slots_after(LIMITS, short)


def test_the_limits_of_a_configuration() -> None:
    assert SlotLimits.of(Config()) is None
    tuned = Config.model_validate({"launch": {"tuning": "auto"}, "actors": {"max_slots": 100}})
    assert SlotLimits.of(tuned) == SlotLimits(1, 100, 16)
    few = Config.model_validate({"launch": {"tuning": "auto"}, "actors": {"max_slots": 5}})
    assert SlotLimits.of(few) == SlotLimits(1, 5, 5)
