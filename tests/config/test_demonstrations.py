"""What demonstrations and `learner.loss: sft` ask of the other fields."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config import Config, resuming
from asyncrl.config.demonstrations import demonstrations_per_step, groups_per_step
from asyncrl.config.rules import warnings
from asyncrl.errors import ConfigError

SFT: dict[str, Any] = {
    "learner.loss": "sft",
    "data.demonstrations": "chats.jsonl",
    "actors.count": 0,
    "eval.tasks": 0,
}


def loaded(**changes: Any) -> Config:
    return Config.load(None, SFT | {name.replace("__", "."): value for name, value in changes.items()})


def test_a_batch_holds_demonstrations_alone_or_beside_groups() -> None:
    alone, beside, none = loaded(), Config.load(None, {"data.demonstrations": "a.jsonl"}), Config()
    assert [groups_per_step(c) for c in (alone, beside, none)] == [0, 16, 16]
    assert [demonstrations_per_step(c) for c in (alone, beside, none)] == [16, 16, 0]
    assert warnings(alone) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"weights.every": 500},  # nobody waits for weights
        {"buffer.max_staleness": 0},
        {"buffer.capacity": 1},
        {"learner.group_size": 1},
        {"learner.corrections": []},
        {"learner.minibatches": 8},
        {"actors.count": 1, "eval.tasks": 5, "eval.every": 2},
        {"actors.count": 1, "eval.sets": {"some": {"tasks": 3, "temperature": 0.5}}},
    ],
)
def test_what_concerns_groups_is_not_asked_for(changes: dict[str, Any]) -> None:
    assert warnings(loaded(**changes)) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"data.demonstrations": ""}, "data.demonstrations empty: name the chats to train on"),
        ({"actors.count": 1}, "actors would have nothing to play. Set actors.count 0, or eval.tasks"),
        ({"eval.tasks": 3}, r"nobody would play the held-out sets \(held_out\): set eval.tasks 0, or actors.count"),
        ({"actors.temperature": 0.7}, "actors.temperature is 0.7 and learner.loss sft.*Set it to 1"),
        ({"learner.minibatches": 3}, "does not divide learner.demonstrations.per_step = 16"),
        ({"learner.teacher.path": "other"}, "learner.teacher.path is set"),
        ({"learner.kl_coef": 0.1}, "learner.kl_coef is set, which demonstrations have no use for"),
        ({"learner.ess_lr": "sqrt", "learner.min_ess": 0.1}, "learner.ess_lr and learner.min_ess are set"),
        ({"learner.demonstrations.per_step": 0}, "per-step is 0"),
        ({"learner.demonstrations.schedule": "sometimes"}, "schedule"),
    ],
)
def test_what_cannot_work_is_said_with_the_remedy(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        loaded(**changes)


def test_a_resumed_run_keeps_its_demonstrations_and_may_change_their_weight() -> None:
    kinds = {
        field: resuming.change(field)
        for field in (
            "data.demonstrations",
            "learner.demonstrations.per_step",
            "learner.demonstrations.weight",
            "learner.demonstrations.schedule",
        )
    }
    assert list(kinds.values()) == ["refused", "refused", "branch", "branch"]
    # With a schedule of the weight, the number of steps decides what a redone step does.
    assert "learner.steps" not in resuming.settings(loaded())
    assert "learner.steps" in resuming.settings(loaded(learner__demonstrations__schedule="cosine"))
