"""Fed with the times of a recording, the play decides what the recording decided, batch for batch."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from asyncrl.audit.ledger import LedgerRows
from asyncrl.buffer.batches import batches
from asyncrl.buffer.ledger.group import Group
from asyncrl.buffer.rules import Rules
from asyncrl.buffer.selection import SAMPLERS, zero_variance
from asyncrl.buffer.tickets import tickets
from asyncrl.plan.playing.following import Followed, follow, recorded_times
from asyncrl.plan.setting import Setting
from asyncrl.tracking import spans
from tests.buffer.fakes import rules
from tests.plan.recording import RENEW_S, record

STEPS = 25


def followed(folder: Path, ledger: LedgerRows, of: Rules, *, actors: int, slots: int, every: int = 1) -> Followed:
    loads = defaultdict(list)
    for role, span in spans.read(folder / "spans.jsonl"):
        loads[role].append(span)
    setting = Setting(actors, slots, of.groups_per_step, of.max_staleness, every, "given")
    return follow(ledger, recorded_times(ledger, dict(loads)), of, setting, renew_s=RENEW_S)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("fifo", {"max_staleness": 1}),
    ("synchronous", {"max_staleness": 0}),
    ("tight", {"max_staleness": 1, "groups_per_step": 3, "group_size": 4, "capacity": 200}),
    ("wait", {"max_staleness": 2, "over_age": "wait", "wait_s": 3.0}),
    ("mask", {"max_staleness": 1, "over_age": "mask"}),
    ("uniform", {"max_staleness": 3, "sampler": SAMPLERS["uniform"]}),
    ("freshest", {"max_staleness": 3, "sampler": SAMPLERS["freshest"]}),
    ("priority, two uses", {"max_staleness": 2, "sampler": SAMPLERS["priority"], "max_uses": 2}),
    ("filtered", {"max_staleness": 2, "filters": (zero_variance,)}),
    ("every second version", {"max_staleness": 2}),
]


@pytest.mark.parametrize(("name", "changes"), CASES, ids=[name for name, _ in CASES])
def test_the_play_makes_the_recorded_batches(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    of, every = rules(**(changes | {"lease_s": 1e9})), 2 if name.startswith("every") else 1
    ledger = record(tmp_path, of, actors=2, slots=5, steps=STEPS, seed=len(name), every=every)
    result = followed(tmp_path, ledger, of, actors=2, slots=5, every=every)
    assert (len(result.recorded), len(result.played)) == (STEPS, STEPS)
    assert result.equal == STEPS, "the first batch that differs"
    assert result.outcome.refused == 0


def dropped(ledger: LedgerRows) -> int:
    return sum(group.state == "dropped" for group in ledger.groups.values())


def test_the_recordings_drop_groups(tmp_path: Path) -> None:
    """Otherwise equal batches would say nothing about drops."""
    of = rules(max_staleness=1, lease_s=1e9)
    assert dropped(record(tmp_path, of, actors=2, slots=5, steps=STEPS, seed=4)) > 5


@pytest.mark.parametrize("rule", ["admission", "sampler"])
def test_replacing_a_rule_of_the_buffer_changes_recording_and_play_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    of = rules(max_staleness=2, lease_s=1e9)
    usual = record(tmp_path / "usual", of, actors=2, slots=6, steps=STEPS, seed=3)
    if rule == "admission":
        monkeypatch.setattr(tickets, "admits", lambda in_flight, waiting, in_batches, *_: in_flight + waiting < 3)
    else:
        monkeypatch.setattr(batches, "choose", lambda sampler, groups, v, n, rng: sorted(groups, key=_last)[:n])
    ledger = record(tmp_path / "changed", of, actors=2, slots=6, steps=STEPS, seed=3)
    changed = followed(tmp_path / "changed", ledger, of, actors=2, slots=6)
    assert changed.equal == STEPS
    of_usual = [b.groups for b in usual.line if b.finished_at is not None]
    assert any(a != b for a, b in zip(changed.recorded, of_usual, strict=True)), "the rule changes the recording"
    monkeypatch.undo()
    kept = followed(tmp_path / "changed", ledger, of, actors=2, slots=6)
    assert kept.equal < STEPS, "with the buffer's own rule the play decides otherwise"


def _last(group: Group) -> int:
    return -group.number
