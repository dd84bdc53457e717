"""What a kill of an actor costs in tokens, with recorded turns and without, with the real processes."""

from __future__ import annotations

import os
import random
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import pytest

from tests.counted_engine import sampled
from tests.counting_env import TURNS, Step
from tests.long_run import START_S, LongRun
from tests.waiting import until

SLOTS, MOST_NEW = 4, 8


@dataclass(frozen=True)
class Cost:
    """Tokens that were sampled for nothing."""

    finished: list[int]
    """By kill: of turns that had ended, and were sampled again."""
    under_way: float
    """In the mean of the kills: of turns that were being sampled."""

    @property
    def mean(self) -> float:
        return mean(self.finished) + self.under_way

    def __str__(self) -> str:
        return f"{self.mean:.1f} tokens a kill: {self.under_way:.1f} under way, of finished turns {self.finished}"


def sampled_twice(steps: Sequence[Step], kills: Sequence[int]) -> list[int]:
    """Tokens of the turns that another took the place of, by the kill behind them. `kills`: how many steps had been
    carried out before each."""
    lost, last = [0] * len(kills), dict[tuple[str, int], tuple[int, Step]]()
    for at, step in enumerate(steps):
        before, other = last.get((step.key, step.count), (at, step))
        if other.said != step.said:
            lost[bisect_left(kills, before + 1)] += other.tokens
        last[step.key, step.count] = at, step
    return lost


def heard(steps: Sequence[Step]) -> int:
    """Tokens of all turns that an environment was given, each once."""
    return sum({(step.key, step.count, step.said): step.tokens for step in steps}.values())


def cost(folder: Path, turns: str, kills: int) -> Cost:
    """One and a half episodes between two kills, more or less."""
    rng = random.Random(os.environ.get("ASYNCRL_TEST_SEED", "0"))
    counts = folder / "counts"
    counts.mkdir(parents=True)
    engine = {"engine": "tests.counted_engine:from_config", "engine_options": {"counts": str(counts)}}
    run = LongRun(folder, "WithSnapshots", turns, 100_000, actors={"slots": SLOTS, "max_new_tokens": MOST_NEW} | engine)
    at: list[int] = []
    try:
        for _ in range(kills):
            enough = sum(at[-1:]) + SLOTS * rng.randrange(TURNS, 2 * TURNS) + rng.randrange(SLOTS)
            assert until(lambda enough=enough: len(run.steps()) >= enough, START_S), run.out
            time.sleep(rng.uniform(0.0, 0.2))  # amid tools or amid tokens
            run.kill("actor-0")
            at.append(len(run.steps()))
        enough = at[-1] + 4 * SLOTS * TURNS  # all that was in flight has been played again
        assert until(lambda: len(run.steps()) >= enough, START_S), run.out
    finally:
        run.close()  # with -9: once more, what is being sampled is lost
    steps = run.steps()
    return Cost(sampled_twice(steps, at), (sampled(counts) - heard(steps)) / (kills + 1))


def test_a_turn_that_another_took_the_place_of_is_counted_at_the_kill_between_them() -> None:
    first, second = Step("a/0", 1, 8, "x"), Step("a/0", 2, 7, "y")
    steps = [first, second, first, Step("a/0", 2, 5, "z"), Step("a/0", 2, 6, "y")]
    assert sampled_twice(steps, [2, 4]) == [7, 5]
    assert sampled_twice([first, second, first, second], [2]) == [0]
    assert heard(steps) == 8 + 6 + 5


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_recorded_turns_cost_a_tenth_of_the_tokens_of_a_kill(tmp_path: Path) -> None:
    """`ASYNCRL_TEST_KILLS` (10) under each of both settings."""
    kills = int(os.environ.get("ASYNCRL_TEST_KILLS", "10"))
    recorded, without = (cost(tmp_path / turns, turns, kills) for turns in ("on", "off"))
    print(f"turns on: {recorded}\nturns off: {without}\n{without.mean / recorded.mean:.1f} times fewer")
    assert recorded.finished == [0] * kills
    assert 0 <= recorded.under_way <= SLOTS * MOST_NEW
    assert 0 <= without.under_way <= SLOTS * MOST_NEW
    assert 10 * recorded.mean <= without.mean
