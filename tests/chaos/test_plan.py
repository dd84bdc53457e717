from __future__ import annotations

from collections import Counter

import pytest

from asyncrl.chaos.command import _injectors
from asyncrl.chaos.faults import INJECTORS
from asyncrl.chaos.plan import CLOCK_S, KINDS, LASTS_S, NET, plan
from asyncrl.config import Config
from asyncrl.errors import ConfigError

ROLES = ("buffer", "weights", "learner", "scorer-0", "actor-0", "actor-1")


def test_the_same_seed_gives_the_same_faults_and_another_others() -> None:
    plans = [plan(seed, tuple(KINDS), ROLES, 20.0, 600.0) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]
    assert len(plans[0]) == 30
    times = [fault.at_s for fault in plans[0]]
    assert times == sorted(times)
    assert all(abs(t - 20.0 * (i + 1)) <= 5.0 for i, t in enumerate(times))


def test_every_kind_has_its_turn_and_befalls_what_it_can() -> None:
    faults = plan(0, tuple(KINDS), ROLES, 1.0, 10.0 * len(KINDS))
    assert set(Counter(fault.kind for fault in faults).values()) == {10}
    for fault in faults:
        least, most = LASTS_S.get(fault.kind, (0.0, 0.0))
        assert least <= fault.for_s <= most
        assert abs(fault.offset_s) <= CLOCK_S
    seen = {kind: {fault.target for fault in faults if fault.kind == kind} for kind in KINDS}
    assert seen["actor"] == {"actor-0", "actor-1"}
    assert seen["node"] <= {"buffer", "weights+learner", "scorer-0", "actor-0", "actor-1"}
    assert seen["net"] <= {f"connections to {name}" for name in ("buffer", "weights", "launcher")}
    assert {fault.mode for fault in faults if fault.kind == "net"} == set(NET)


def test_a_fault_says_what_it_is() -> None:
    said = [str(fault) for fault in plan(3, tuple(KINDS), ROLES, 1.0, 30.0 * len(KINDS))]
    assert "weights+learner lost with its host" in said
    assert "environment of every episode under way lost" in said
    assert any(line.startswith("connections to buffer silent for ") for line in said)
    assert any(line.startswith("clock -") and line.endswith(" s off") for line in said)
    assert any(line.startswith("disk full for ") for line in said)


def test_what_the_run_does_not_have_cannot_be_killed() -> None:
    with pytest.raises(ConfigError, match="'weights', and the run has no such process"):
        plan(0, ("weights",), ("buffer", "learner"), 1.0, 30.0)
    with pytest.raises(ConfigError, match="'meteor': expected some of actor, learner"):
        plan(0, ("meteor",), ROLES, 1.0, 30.0)


@pytest.mark.parametrize(("every_s", "for_s"), [(0.0, 1.0), (-1.0, 1.0), (float("nan"), 1.0), (2.0, 1.0)])
def test_a_plan_without_a_fault_or_without_an_end_is_refused(every_s: float, for_s: float) -> None:
    with pytest.raises(ConfigError, match="--every is"):
        plan(0, ("actor",), ROLES, every_s, for_s)


def test_every_kind_of_fault_has_an_injector() -> None:
    assert INJECTORS.keys() == KINDS.keys()
    built = _injectors(["env", "actor", "net", "stop"], Config(), seed=1)
    assert built["actor"] is built["stop"]
    assert len({*map(id, built.values())}) == 3
