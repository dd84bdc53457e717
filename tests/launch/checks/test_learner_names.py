"""Unknown names among the learner's choices are refused before anything starts, by lists that equal the tables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch import preflight
from asyncrl.launch.checks.learner_names import NAMES


def test_the_lists_are_the_keys_of_the_tables() -> None:
    from asyncrl.learner.advantages import ESTIMATORS
    from asyncrl.learner.build import BACKENDS
    from asyncrl.learner.corrections import CORRECTIONS
    from asyncrl.learner.losses import AGGREGATIONS, LOSSES
    from asyncrl.learner.objective.kl import KL
    from asyncrl.learner.objective.shaping import SHAPING

    tables: dict[str, Mapping[str, Any]] = {
        "backend": BACKENDS, "loss": LOSSES, "advantage": ESTIMATORS, "aggregation": AGGREGATIONS, "kl": KL,
        "corrections": CORRECTIONS, "shaping": SHAPING,
    }  # fmt: skip
    assert {kind: tuple(table) for kind, table in tables.items()} == NAMES


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"learner.backend": "fsdp"}, "learner.backend: 'fsdp' is not a known name (did you mean 'fsdp2'?)"),
        ({"learner.loss": "decoupled_pp"}, "learner.loss: 'decoupled_pp' is not a known name"),
        ({"learner.advantage": "grpoo"}, "learner.advantage: 'grpoo' is not a known name (did you mean 'grpo'?)"),
        ({"learner.advantage_by_env": {"lookup": {"name": "gigpoo"}}}, "learner.advantage_by_env.lookup: 'gigpoo'"),
        ({"learner.aggregation": "token_meam"}, "learner.aggregation: 'token_meam' is not a known name"),
        ({"learner.kl": "k4"}, "learner.kl: 'k4' is not a known name"),
        ({"learner.corrections": [{"name": "none"}, {"name": "tiss"}]}, "learner.corrections[1]: 'tiss'"),
        ({"learner.shaping": [{"name": "overlong"}]}, "learner.shaping[0]: 'overlong' is not a known name"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        preflight.check_names(Config.load("quickstart", {"learner.unsafe": True, **changes}))


def test_the_users_own_are_left_to_the_learner() -> None:
    preflight.check_names(Config.load("quickstart", {"learner.advantage": "mine.py:estimate"}))
