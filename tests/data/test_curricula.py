"""Curricula that follow the policy."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.data.base import GroupResult
from asyncrl.data.curricula import CURRICULA, BySuccess, Levels
from asyncrl.data.sources.generated import LEVEL, GeneratedSource
from asyncrl.data.sources.reasoning_gym import ReasoningGymSource
from asyncrl.errors import ConfigError


def result(index: int, *rewards: float) -> GroupResult:
    return GroupResult(index, f"t{index}", rewards)


def restored(curriculum: Any, **options: Any) -> Any:
    other = type(curriculum)(**options)
    other.restore(json.loads(json.dumps(curriculum.state())))
    return other


def test_before_anything_is_measured_every_task_comes_once_per_epoch() -> None:
    curriculum = BySuccess(seed=1, train_size=20)
    epochs = [[curriculum.draw(20 * epoch + i) for i in range(20)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_easy_and_hard_tasks_give_way_to_those_in_between_and_are_not_forgotten() -> None:
    options = {"seed": 1, "train_size": 30, "keep": 0.1, "decay": 0.5}
    curriculum = BySuccess(**options)
    for index in range(30):
        curriculum.update(1, [result(index, *((1.0, 1.0), (0.0, 0.5), (1.0, 0.0))[index % 3])])
    drawn = Counter(curriculum.draw(number) % 3 for number in range(3000))
    assert drawn[2] > 2000
    assert 50 < drawn[0] < 500
    assert 50 < drawn[1] < 500
    again = restored(curriculum, **options)
    assert [again.draw(n) for n in range(100)] == [curriculum.draw(n) for n in range(100)]
    curriculum.update(2, [result(0, 0.0, 0.0)])
    assert curriculum.success_of(0) == pytest.approx(0.5, abs=0.01), "half of what was known stays"
    assert again.success_of(0) == 1.0


def test_levels_rise_with_success_fall_with_failure_and_stay_within() -> None:
    options: dict[str, Any] = {"levels": 3, "window": 4, "raise_at": 0.75, "lower_at": 0.25, "review": 0.25, "seed": 3}
    curriculum = Levels(**options)

    def window(level: int, reward: float) -> int:
        curriculum.update(1, [result(level * LEVEL + i, reward, reward) for i in range(4)])
        return curriculum.level

    assert {curriculum.draw(n) for n in range(50)} == set(range(50)), "nothing below level 0 to go over again"
    curriculum.update(1, [result(0, 1.0)])
    again = restored(curriculum, **options)
    for one in (curriculum, again):
        one.update(1, [result(i, 1.0) for i in range(3)])
    assert again.level == curriculum.level == 1
    assert window(0, 1.0) == 1, "groups of another level do not count"
    drawn = Counter(curriculum.draw(n) // LEVEL for n in range(1000))
    assert set(drawn) == {0, 1}
    assert 150 < drawn[0] < 350
    assert [window(1, 0.0), window(0, 0.0)] == [0, 0]
    assert [window(0, 1.0), window(1, 1.0), window(2, 1.0)] == [1, 2, 2]


def test_sources_make_tasks_of_the_level_that_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "levels.py").write_text(
        "def make(rng, level): return {'prompt': f'{level}: {rng.randrange(10**9)}'}\n"
        "def flat(rng): return {'prompt': 'x'}\n"
    )
    source = GeneratedSource(f"{tmp_path}/levels.py:make", levels=2, held_out_size=4)
    assert [source.task(level * LEVEL + 7)["prompt"][0] for level in (0, 1, 5)] == ["0", "1", "5"]
    assert [source.held_out(i)["prompt"][0] for i in range(4)] == ["0", "1", "0", "1"]
    with pytest.raises(ConfigError, match="has no parameter `level`"):
        GeneratedSource(f"{tmp_path}/levels.py:flat", levels=2)
    puzzles = ReasoningGymSource(
        dataset="chain_sum",
        levels=[{"min_terms": 2, "max_terms": 2}, {"min_terms": 6, "max_terms": 6}],
        held_out_size=2,
    )
    signs = [sum(c in "+-" for c in str(puzzles.task(level * LEVEL)["prompt"]).split()) for level in (0, 1, 9)]
    assert signs == [1, 5, 5]


def test_what_cannot_be_is_refused() -> None:
    from asyncrl.buffer.tasks.sources import open_curriculum, open_source

    config = Config.model_validate({"data": {"source": "lookup", "curriculum": "by_success"}})
    with pytest.raises(ConfigError, match=r"data\.source has no end: use levels"):
        open_curriculum(config, open_source(config))
    with pytest.raises(ConfigError, match=r"low 0\.9, high 0\.1"):
        BySuccess(train_size=3, low=0.9, high=0.1)
    with pytest.raises(ConfigError, match="start 2, levels 2"):
        Levels(levels=2, start=2)
    with pytest.raises(ConfigError, match=r"success of 3 tasks and data\.source has 4"):
        BySuccess(train_size=4).restore(BySuccess(train_size=3).state())
    assert {"by_success", "levels", "in_order"} <= CURRICULA.keys()
