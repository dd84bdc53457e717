from __future__ import annotations

from collections import Counter

import pytest

from asyncrl.chaos.plan import STOP_S, plan
from asyncrl.errors import ConfigError

ROLES = ("buffer", "learner", "actor-0", "actor-1")


def test_the_same_seed_gives_the_same_faults_and_another_others() -> None:
    plans = [plan(seed, ("actor", "learner", "buffer", "stop"), ROLES, 20.0, 600.0) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]
    assert len(plans[0]) == 30
    times = [fault.at_s for fault in plans[0]]
    assert times == sorted(times)
    assert all(abs(t - 20.0 * (i + 1)) <= 5.0 for i, t in enumerate(times))


def test_every_kind_has_its_turn() -> None:
    faults = plan(0, ("actor", "buffer", "stop"), ROLES, 1.0, 30.0)
    halts = [fault.stop_s for fault in faults if fault.stop_s]
    assert len(halts) == 10
    assert all(STOP_S[0] <= s <= STOP_S[1] for s in halts)
    killed = Counter(fault.role.partition("-")[0] for fault in faults if not fault.stop_s)
    assert killed == {"actor": 10, "buffer": 10}


def test_what_the_run_does_not_have_cannot_be_killed() -> None:
    with pytest.raises(ConfigError, match="'weights', and the run has no such process"):
        plan(0, ("weights",), ROLES, 1.0, 30.0)
