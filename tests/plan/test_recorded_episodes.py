"""The episodes of a play last as long as the recorded ones, those that gave no trajectory included."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config import Config
from asyncrl.plan.fitting.episodes import recorded_groups
from asyncrl.plan.fitting.record import Record, _turns
from tests.buffer.fakes import rules
from tests.plan.recording import record


def recorded(folder: Path) -> Record:
    ledger = record(folder, rules(max_staleness=1, lease_s=1e9), actors=2, slots=5, steps=60, seed=4)
    return Record(Config(), ledger, _turns(folder / "buffer", ledger), {}, [])


def test_an_episode_that_ended_after_its_group_was_dropped_lasts_as_long_as_it_did(tmp_path: Path) -> None:
    found = recorded(tmp_path)
    ledger = found.ledger
    seconds = {place: a[-1].ended_at - a[-1].issued_at for place, a in ledger.attempts.items() if a[-1].ended_at}
    late = {place: seconds[place] for place, a in ledger.attempts.items() if a[-1].ended == "late"}
    longest = max(seconds[place] for place in ledger.trajectories)
    beyond = {place: s for place, s in late.items() if s > longest and ledger.groups[place[0]].payload}
    assert beyond, "otherwise this test says nothing"
    groups = dict(zip((n for n, g in ledger.groups.items() if g.payload), recorded_groups(found, 0), strict=True))
    for (number, index), lasted in beyond.items():
        final = groups[number][index].turns[-1]
        assert final.environment == pytest.approx(0.05 + lasted - longest)
