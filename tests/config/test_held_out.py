"""The held-out sets of a configuration, and what cannot be evaluated during a run."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from asyncrl.config import Config
from asyncrl.config.held_out import HeldOutSet, for_set, held_out_sets
from asyncrl.config.rules import warnings


def config(**sections: dict[str, Any]) -> Config:
    return Config.model_validate(sections)


def test_the_fields_of_eval_are_one_set() -> None:
    assert held_out_sets(Config()) == (HeldOutSet("held_out", 200, 1, True, 1.0),)
    assert held_out_sets(config(eval={"tasks": 0})) == ()


def test_a_set_takes_what_it_leaves_out_from_eval_and_from_training() -> None:
    one = {
        "tasks": 3,
        "env": "calculator",
        "env_options": {"x": 1},
        "source": "mine:Source",
        "pass_at": [2],
        "samples": 2,
    }
    c = config(
        eval={"tasks": 9, "success": "solved", "sets": {"own": one, "rest": {}}},
        actors={"temperature": 0.7},
        env={"group_score": "mine:score"},
    )
    own, rest = held_out_sets(c)
    assert own == HeldOutSet("own", 3, 2, True, 0.7, "solved", (2,))
    assert rest == HeldOutSet("rest", 9, 1, True, 0.7, "solved", ())
    alone = for_set(c, "own")
    assert (alone.env.name, alone.env.options, alone.data.source) == ("calculator", {"x": 1}, "mine:Source")
    assert (alone.env.group_score, alone.env.max_turns) == ("", c.env.max_turns)
    assert for_set(c, "rest").env == c.env
    assert [each.tasks for each in held_out_sets(alone)] == [3], "it is the only one there"


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"eval": {"sets": {"a/b": {}}}}, "eval.sets has a set 'a/b'"),
        ({"eval": {"sets": {"a": {"pass_at": [4], "samples": 2}}}}, "eval.sets.a.pass_at has 4"),
        ({"eval": {"sets": {"a": {"env_options": {"x": 1}}}}}, "eval.sets.a.env_options"),
        ({"eval": {"sets": {"a": {}}, "tasks": 0}}, "eval.sets.a has no tasks"),
        ({"eval": {"every": 2}, "actors": {"count": 2, "eval": 2}}, "actors.eval is 2 of actors.count = 2"),
        ({"actors": {"count": 2, "eval": 1}}, "actors.eval is 1 and eval.every 0"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(sections: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        config(**sections)


def test_a_single_actor_is_told_what_evaluation_costs_it() -> None:
    sections: dict[str, Any] = {"eval": {"every": 5, "tasks": 10}, "learner": {"groups_per_step": 4, "group_size": 2}}
    (warning,) = warnings(config(**sections, buffer={"capacity": 64}))
    assert "up to 20 held-out episodes per 40 training episodes" in warning
    assert warnings(config(**sections, buffer={"capacity": 64}, actors={"count": 2})) == []
