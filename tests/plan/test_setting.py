"""Who shares cores, and the rules under a setting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.plan.setting import Setting, config_with, domains, rules_of
from asyncrl.plan.times import Domain


def config(**sections: dict[str, Any]) -> Config:
    return Config.model_validate({"buffer": {"capacity": 512}, "learner": {"groups_per_step": 24}} | sections)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, [(4.0, {"actor", "buffer", "learner"})]),
        (
            {"launch": {"cpus": {"actor": (0,), "learner": (1,), "buffer": (1,)}}},
            [(1, {"actor"}), (1, {"buffer", "learner"})],
        ),
        ({"launch": {"cpus": {"actor": (0, 1)}}}, [(4.0, {"actor", "buffer", "learner"})]),
        ({"launch": {"host": "auto"}, "weights": {"channel": "zmq"}}, []),
        ({"actors": {"engine": "vllm"}}, []),
        (
            {"actors": {"engine": "vllm"}, "launch": {"gpus": {"actor": 0.4, "learner": 0.6}}},
            [
                (1.0, {"actor", "learner"}),
            ],
        ),
    ],
    ids=["all", "pinned apart", "pinned among the others", "hosts", "gpus", "one gpu"],
)
def test_who_shares_cores(sections: dict[str, Any], expected: list[tuple[float, set[str]]]) -> None:
    found = domains(config(**sections), 4)
    assert sorted(found, key=str) == sorted((Domain(n, frozenset(roles)) for n, roles in expected), key=str)


def test_a_setting_changes_its_fields_and_the_capacity_that_it_needs() -> None:
    base = Setting.of(config())
    wide = replace(base, max_staleness=8, groups_per_step=48)
    rules = rules_of(config(), wide)
    assert (rules.max_staleness, rules.groups_per_step, rules.capacity) == (8, 48, 9 * 48 * 8)
    assert wide.changes(base) == {"learner.groups_per_step": 48, "buffer.max_staleness": 8}
    assert config_with(config(), {}).buffer.capacity == 512


def test_a_setting_that_the_rules_of_the_config_refuse() -> None:
    with pytest.raises(ConfigError, match=r"weights\.every"):
        rules_of(config(), replace(Setting.of(config()), max_staleness=0, every=2))
