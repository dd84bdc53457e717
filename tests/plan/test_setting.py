"""Who shares cores, and the rules under a setting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from asyncrl.buffer.bounds.automatic import Auto
from asyncrl.buffer.bounds.slots import SlotLimits
from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.plan.setting import Setting, config_with, domains, rules_of, splits
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


def test_what_the_configuration_says_is_played_tuned_or_fixed() -> None:
    tuned = config(launch={"tuning": "auto"}, actors={"max_slots": 100})
    fixed = Setting.of(tuned, slots=24, bound=3)
    assert (fixed.tuning, fixed.slots, fixed.max_staleness) == ("off", 24, 3)
    base = fixed.tuned(tuned)
    rules = rules_of(tuned, base)
    assert (rules.tuning, rules.auto) == (SlotLimits.of(tuned), Auto.of(tuned))
    assert rules.tuning is not None
    still = rules_of(tuned, fixed)
    assert (still.tuning, still.auto, still.max_staleness) == (None, None, 3)
    assert fixed.changes(base) == {"actors.slots": 24, "buffer.max_staleness": 3, "launch.tuning": "off"}
    assert base.changes(fixed) == {"actors.slots": "auto", "buffer.max_staleness": "auto", "launch.tuning": "auto"}
    assert rules_of(config(), Setting.of(config()).tuned(config())).tuning == SlotLimits(1, 256, 16)
    assert str(base).endswith("weights.every 1, buffer.sampler fifo, launch.tuning auto")
    assert "actors.slots auto" in str(base)


def test_how_gpus_may_be_divided() -> None:
    engine = {"actors": {"engine": "vllm", "engine_options": {"tensor_parallel": 2}}}
    assert splits(config(actors={"engine": "vllm"}), 8) == [(8 - r, r) for r in range(1, 8)]
    assert splits(config(**engine), 8) == [(3, 2), (2, 4), (1, 6)]
    with pytest.raises(ConfigError, match="which cannot be divided: an actor has 2"):
        splits(config(**engine), 2)
    with pytest.raises(ConfigError, match="an actor has 0 GPUs and a rank of the learner 1"):
        splits(config(), 8)


def test_a_setting_that_the_rules_of_the_config_refuse() -> None:
    with pytest.raises(ConfigError, match=r"weights\.every"):
        rules_of(config(), replace(Setting.of(config()), max_staleness=0, every=2))
