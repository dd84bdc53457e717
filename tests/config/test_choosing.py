"""What is chosen by results of evaluations, and what cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from asyncrl.config import Config
from asyncrl.config.choosing import Choosing
from asyncrl.config.held_out import every_set, for_set, held_out_sets

SETS: dict[str, Any] = {"every": 5, "sets": {"dev": {"tasks": 4}, "test": {"tasks": 9, "greedy": False}}}


def config(**fields: Any) -> Config:
    return Config.model_validate({"eval": SETS | fields})


def test_a_set_is_meant_as_it_is_sampled_unless_it_is_said() -> None:
    c = config(stop_at={"dev": 0.9}, patience={"dev/greedy": 3}, keep_best="dev")
    assert Choosing.of(c) == Choosing(
        ((("dev", "sampled"), 0.9),), ((("dev", "greedy"), 3),), keep_best=("dev", "sampled")
    )
    assert Choosing.of(config()) == Choosing()


def test_the_final_set_is_not_played_during_the_run(tmp_path: Any) -> None:
    c = config(keep_best="dev", final="test")
    assert [each.name for each in held_out_sets(c)] == ["dev"]
    assert [each.name for each in every_set(c)] == ["dev", "test"]
    alone = for_set(c, "test")
    assert (alone.eval.tasks, alone.eval.greedy, alone.eval.final) == (9, False, "")
    assert Config.model_validate(alone.model_dump()) == alone


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"stop_at": {"dve": 0.9}}, r"eval.stop_at names the set 'dve'; the sets .*: dev, test. Name one of them"),
        ({"patience": {"dev/best": 2}}, "eval.patience is 'dev/best': behind `/` stands sampled or greedy"),
        ({"keep_best": "test/greedy"}, "eval.keep_best is 'test/greedy', and this set is not played greedily"),
        ({"stop_at": {"dev": 1.5}}, "stop_at.*less than or equal to 1"),
        ({"patience": {"dev": 0}}, "patience.*greater than or equal to 1"),
        ({"every": 0, "keep_best": "dev"}, "names the set 'dev' and eval.every is 0"),
        ({"final": "test"}, "eval.final is 'test' without eval.keep_best"),
        ({"final": "tset", "keep_best": "dev"}, r"eval.final is 'tset', none of eval.sets \(dev, test\)"),
        ({"final": "dev", "keep_best": "dev"}, "eval.final is 'dev', which chooses"),
    ],
)
def test_what_cannot_be_is_refused_with_the_field_and_the_remedy(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=f"(?s){says}"):
        config(**fields)


@pytest.mark.parametrize("channel", ["shm", "zmq"])
def test_a_final_set_is_played_on_no_machine_but_that_of_the_engines(channel: str) -> None:
    given = SETS | {"keep_best": "dev", "final": "test"}
    launch = {"backend": "ray", "host": "auto"}
    with pytest.raises(ValidationError, match=r"eval\.final is 'test' and launch\.backend 'ray'"):
        Config.model_validate({"eval": given, "launch": launch, "weights": {"channel": channel}})
