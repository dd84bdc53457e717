"""The curriculum that draws tasks by what can be learned from them."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data.curricula import CURRICULA
from asyncrl.data.learnability import Learnability, learnability
from asyncrl.errors import ConfigError
from tests.data.test_curricula import restored, result


@given(st.integers(0, 30), st.integers(0, 30))
def test_learnability_is_the_mean_of_p_times_one_minus_p_under_the_counts(s: int, f: int) -> None:
    """Moments of the Beta distribution, exactly: E[p] - E[p^2]."""
    a, n = s + 1, s + f + 2
    mean, square = Fraction(a, n), Fraction(a * (a + 1), n * (n + 1))
    assert math.isclose(learnability(s, f), float(mean - square), rel_tol=1e-12)


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_tasks_are_drawn_in_proportion_to_it(power: float) -> None:
    options = {"power": power, "explore": 0.2, "decay": 0.0, "seed": 3, "train_size": 4}
    curriculum = Learnability(**options)
    rewards = [(1.0,) * 8, (0.0,) * 8, (1.0, 0.0) * 4]  # the fourth was never played
    curriculum.update(1, [result(index, *each) for index, each in enumerate(rewards)])
    assert [curriculum.counts(index) for index in range(4)] == [(8, 0), (0, 8), (4, 4), (0, 0)]
    weights = [learnability(*curriculum.counts(index)) ** power for index in range(4)]
    drawn = Counter(curriculum.draw(number) for number in range(8000))
    for index in range(4):
        expected = 0.2 / 4 + 0.8 * weights[index] / sum(weights)
        assert abs(drawn[index] / 8000 - expected) < 0.025, index
    again = restored(curriculum, **options)
    assert [again.draw(n) for n in range(100)] == [curriculum.draw(n) for n in range(100)]


def test_old_counts_decay_and_large_groups_keep_their_share() -> None:
    curriculum = Learnability(decay=0.5, train_size=2)
    curriculum.update(1, [result(0, 1.0, 1.0, 1.0, 0.0)])
    curriculum.update(2, [result(0, 0.5, 0.0, 0.0, 0.0), result(1, *[1.0] * 90, *[0.0] * 30)])
    assert curriculum.counts(0) == (1.5, 4.5)
    solved, failed = curriculum.counts(1)
    assert (solved, failed) == (255 / 8, 85 / 8)
    assert curriculum.counts(1) == restored(curriculum, train_size=2).counts(1)


def test_exploring_alone_takes_every_task_once_per_epoch() -> None:
    curriculum = Learnability(explore=1.0, train_size=20)
    assert sorted(curriculum.draw(n) for n in range(20)) == list(range(20))


def test_what_cannot_work_is_refused() -> None:
    assert CURRICULA["learnability"] is Learnability
    with pytest.raises(ConfigError, match=r"data\.source has no end: use levels"):
        Learnability()
    with pytest.raises(ConfigError, match=r"explore 2, decay 0\.5"):
        Learnability(explore=2, train_size=4)
    with pytest.raises(ConfigError, match=r"knows the success of 4 tasks and data\.source has 5"):
        Learnability(train_size=5).restore(Learnability(train_size=4).state())
