"""Every number of a report has a bound, is sent at it and beyond it, and what reports leave behind is bounded."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.tracking import messages, state
from asyncrl.tracking.state import RunState
from asyncrl.wire import WireError, pack

STEPS = 100
REPORT = {
    "role": "learner", "kind": "metrics", "pid": 1, "t": 1.0, "waits": {"batch": 1.0}, "cause": None, "on": "",
    "since": 1.0, "lost": 0, "unknown": 0, "values": {"weights/loss": 1.0}, "step": 1,
}  # fmt: skip
EVENT = REPORT | {"kind": "event", "event": "published", "fields": {"step": 1}}
MOST: dict[str, float] = {**messages.BOUNDS, "step": STEPS}


def test_every_number_of_a_report_is_declared() -> None:
    numbers = {name for name, value in REPORT.items() if isinstance(value, int | float)} | {"waits"}
    assert numbers == set(MOST)


@pytest.mark.parametrize("name", MOST)
def test_a_number_is_taken_up_to_its_bound_and_refused_beyond(name: str) -> None:
    def report(value: Any) -> bytes:
        return pack(REPORT | {name: {"batch": value} if name == "waits" else value})

    for good in (0, MOST[name]):
        messages.decode(report(good), STEPS)
    beyond: list[Any] = [
        MOST[name] + 1,
        -MOST[name] - 1,
        2**63,
        2**64 - 1,
        float("nan"),
        float("inf"),
        1e308,
        True,
        "1",
    ]
    for bad in beyond:
        with pytest.raises(WireError, match=name):
            messages.decode(report(bad), STEPS)


def test_mappings_and_events_are_taken_up_to_their_size() -> None:
    messages.decode(pack(EVENT | {"fields": {str(i): i for i in range(messages.MAX_FIELDS)}}), STEPS)
    messages.decode(pack(REPORT | {"waits": {str(i): 1 for i in range(messages.MAX_CAUSES)}}), STEPS)
    messages.decode(pack(REPORT | {"values": {str(i): 1 for i in range(messages.MAX_VALUES)}}), STEPS)
    for bad in (
        EVENT | {"fields": {str(i): i for i in range(messages.MAX_FIELDS + 1)}},
        EVENT | {"fields": {"why": "x" * messages.MAX_EVENT_BYTES}},
        REPORT | {"waits": {str(i): 1 for i in range(messages.MAX_CAUSES + 1)}},
        REPORT | {"values": {str(i): 1 for i in range(messages.MAX_VALUES + 1)}},
    ):
        with pytest.raises(WireError):
            messages.decode(pack(bad), STEPS)


def test_names_that_reports_bring_are_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MAX_NAMES", 100)
    run = RunState(0.0, STEPS, 1)
    family = "waits/actor/cause-{}"
    run.take(REPORT | {"step": None, "values": {family.format(i): 1.0 for i in range(100)}})
    with pytest.raises(ValueError, match="100 series of 1 roles are kept already"):
        run.take(REPORT | {"step": None, "values": {family.format(100): 1.0}})
    run.take(REPORT | {"step": None, "values": {family.format(0): 2.0}})


def test_causes_of_earlier_starts_are_kept_up_to_a_number() -> None:
    run = RunState(0.0, STEPS, 1)
    for pid in range(1, 30):
        waits = {f"{pid}-{i}": 1.0 for i in range(messages.MAX_CAUSES)}
        run.take(REPORT | {"pid": pid, "waits": waits, "values": {}, "step": None})
    assert len(run.roles["learner"].waits_before) <= state.MAX_CAUSES
