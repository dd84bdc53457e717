"""Constraints that span fields, and what is only worth a warning."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from asyncrl.config import Config
from asyncrl.config.rules import warnings


def config(**sections: dict[str, Any]) -> Config:
    return Config.model_validate(sections)


def test_the_defaults_work() -> None:
    assert warnings(Config()) == []


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Config().learner.lr = 1.0


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"weights": {"every": 4}}, "weights.every"),
        ({"buffer": {"capacity": 127}}, "buffer.capacity"),
        ({"learner": {"minibatches": 5}}, "learner.minibatches"),
        ({"actors": {"max_new_tokens": 512}}, "actors.max_new_tokens"),
        ({"learner": {"corrections": []}}, "learner.corrections"),
        ({"learner": {"corrections": [{"name": "none"}]}}, "learner.corrections"),
        ({"learner": {"corrections": [], "loss": "gspo"}}, "learner.corrections"),
        ({"learner": {"proximal": "behaviour"}}, "learner.proximal"),
        ({"learner": {"ess_lr_base": 0.0}}, "ess_lr_base"),
        ({"actors": {"top_p": 0.9, "max_kept": 0}}, r"actors\.max_kept is 0 while actors\.top_p is 0\.9"),
        ({"actors": {"top_k": 5, "max_kept": 0}}, "learner.unsafe: true"),
        ({"actors": {"min_p": 0.1, "max_kept": 0}}, "min_p 0.1"),
        ({"actors": {"min_p": 1.0}}, "min_p"),
        ({"actors": {"max_kept": 4097}}, "max_kept"),
        ({"actors": {"top_p": 0.9, "engine": "sglang"}}, "actors.engine sglang.*use hf or vllm"),
        ({"actors": {"top_p": 0.9, "engine": "vllm"}}, "Set actors.top_k 128, half of"),
        ({"actors": {"min_p": 0.1, "engine": "vllm_server"}}, "under top_k only"),
    ],
)
def test_what_cannot_work_together_is_refused(sections: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        config(**sections)


@pytest.mark.parametrize(
    "sections",
    [
        {"weights": {"every": 3}},
        {"buffer": {"capacity": 128}},
        {"learner": {"minibatches": 4}},
        {"learner": {"corrections": []}, "buffer": {"max_staleness": 0}},
        {"learner": {"corrections": [], "unsafe": True}},
        {"learner": {"corrections": [], "loss": "topr"}},
        {"learner": {"corrections": [], "loss": "mine:loss"}},
        {"learner": {"proximal": "behaviour", "loss": "reinforce"}},
        {"learner": {"proximal": "behaviour", "unsafe": True}},
        {"learner": {"proximal": "behaviour"}, "buffer": {"max_staleness": 0}},
        {"actors": {"top_p": 0.9, "max_kept": 0}, "learner": {"unsafe": True}},
        {"actors": {"top_p": 0.9}},
        {"actors": {"top_p": 0.9, "top_k": 300, "engine": "vllm"}},
        {"actors": {"min_p": 0.1}},
    ],
)
def test_what_is_just_within_bounds_is_taken(sections: dict[str, Any]) -> None:
    config(**sections)


def test_an_approximation_of_what_is_free_is_told() -> None:
    assert "minibatches" in warnings(config(learner={"proximal": "approximate"}))[0]
    assert warnings(config(learner={"proximal": "approximate", "minibatches": 2})) == []


@pytest.mark.parametrize(("engine", "top_k", "warned"), [("vllm", 128, 0), ("vllm", 129, 1), ("hf", 256, 0)])
def test_top_k_of_vllm_leaves_room_for_equal_logits(engine: str, top_k: int, warned: int) -> None:
    said = warnings(config(actors={"engine": engine, "top_k": top_k}))
    assert [("keeps all ids" in w, "actors.top_k 128" in w) for w in said] == [(True, True)] * warned


def test_a_limit_that_the_smallest_automatic_bound_does_not_keep_is_told() -> None:
    sections: dict[str, Any] = {"weights": {"every": 3}, "learner": {"lr": 1e-5}}
    auto = {"max_staleness": "auto", "staleness_lr": 1e-5}
    assert "never lowered below" in warnings(config(buffer=auto, **sections))[0]
    assert warnings(config(buffer=auto | {"staleness_lr": 2e-5}, **sections)) == []
    assert warnings(config(buffer=auto, learner={"lr": 1e-5})) == []


def test_a_bound_too_tight_to_overlap_is_told() -> None:
    assert "overlap" in warnings(config(weights={"every": 2}, buffer={"max_staleness": 2}))[0]
    assert warnings(config(weights={"every": 2}, buffer={"max_staleness": 3})) == []
