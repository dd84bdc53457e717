from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.actors.concurrency import CALM, FIRST, STEP, Concurrency
from asyncrl.config import ActorsConfig, Config


def stats(**changes: float) -> dict[str, float]:
    return {"waiting": 0.0, "kv_use": 0.1, "preempted": 0.0, **changes}


def auto(most: int = 256) -> Concurrency:
    return Concurrency.of(Config(actors=ActorsConfig(slots="auto", max_slots=most)))


def test_a_number_stays_what_it_is() -> None:
    concurrency = Concurrency.of(Config(actors=ActorsConfig(slots=7)))
    for seen in (stats(), stats(preempted=3.0), stats()):
        assert not concurrency.adjust(7, seen)
        assert concurrency.limit == 7


@pytest.mark.parametrize("seen", [stats(waiting=1.0), stats(kv_use=0.95)])
def test_it_grows_while_all_slots_are_used_and_the_engine_has_room(seen: dict[str, float]) -> None:
    concurrency = auto()
    assert concurrency.limit == FIRST
    assert concurrency.adjust(FIRST, stats())
    assert concurrency.limit == FIRST + STEP
    assert not concurrency.adjust(FIRST, stats())
    assert not concurrency.adjust(concurrency.limit, seen)
    assert concurrency.limit == FIRST + STEP


def test_a_preemption_takes_a_third_away_and_then_it_waits() -> None:
    concurrency = auto()
    concurrency.limit = 90
    assert not concurrency.adjust(90, stats(preempted=2.0))
    assert concurrency.limit == 60
    grown = [concurrency.adjust(60, stats(preempted=2.0)) for _ in range(CALM + 1)]
    assert grown == [False] * CALM + [True]


def test_it_settles_around_what_fits() -> None:
    """An engine whose KV cache holds 100 requests and which preempts each one more."""
    concurrency, preempted, seen = auto(), 0.0, []
    for _ in range(400):
        playing = concurrency.limit
        preempted += max(0, playing - 100)
        concurrency.adjust(playing, stats(kv_use=min(1.0, playing / 100), preempted=preempted))
        seen.append(concurrency.limit)
    assert min(seen[100:]) >= 60
    assert max(seen[100:]) <= 100 + STEP


def test_what_the_buffer_said_counts_where_it_is_less_than_what_the_engine_has_room_for() -> None:
    tuned = Config.model_validate({"launch": {"tuning": "auto"}, "actors": {"max_slots": 90}})
    concurrency = Concurrency.of(tuned)
    assert (concurrency.slots, concurrency.limit) == (90, 90), "the buffer decides before it has said anything"
    concurrency.told = 30
    assert (concurrency.slots, concurrency.free(7), concurrency.free(31)) == (30, 23, 0)
    concurrency.adjust(30, stats(preempted=1.0))
    assert (concurrency.slots, concurrency.limit) == (20, 20), "a third of what was played, whatever the maximum"
    concurrency.told = 12
    assert concurrency.slots == 12


@given(st.lists(st.tuples(st.integers(0, 300), st.floats(0, 1), st.integers(0, 3), st.integers(0, 2)), max_size=60))
def test_it_stays_within_its_bounds(looks: list[tuple[int, float, int, int]]) -> None:
    concurrency, preempted = auto(40), 0.0
    for playing, kv_use, waiting, more in looks:
        preempted += more
        concurrency.adjust(playing, stats(kv_use=kv_use, waiting=float(waiting), preempted=preempted))
        assert 1 <= concurrency.limit <= 40


@pytest.mark.parametrize("slots", [0, "all"])
def test_anything_else_is_refused(slots: Any) -> None:
    with pytest.raises(ValueError, match="slots"):
        ActorsConfig(slots=slots)
