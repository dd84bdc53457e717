"""When faults begin and end, without a run."""

from __future__ import annotations

from asyncrl.chaos.plan import Fault
from asyncrl.chaos.schedule import Schedule

INFINITE = float("inf")


def test_one_fault_of_a_kind_at_a_time() -> None:
    first, second = Fault(1.0, "net", "connections to buffer", 10.0), Fault(5.0, "net", "connections to weights", 1.0)
    schedule = Schedule([first, second], within_s=100.0)
    schedule.begin(first, 1.0)
    assert schedule.due(6.0) is None, "a link is cut, silent or slow, but not two of them"
    assert schedule.ended(11.0) == [first]
    assert schedule.due(11.0) is second


def test_a_late_fault_delays_the_others_and_the_deadline() -> None:
    late, next_one = Fault(1.0, "actor", "actor-0"), Fault(2.0, "buffer", "buffer")
    schedule = Schedule([late, next_one], within_s=10.0)
    assert schedule.due(31.0) is late
    schedule.begin(late, 31.0)
    assert schedule.due(31.9) is None
    assert schedule.due(32.0) is next_one
    assert not schedule.overdue(42.0)
    assert schedule.overdue(42.1)


def test_faults_under_way_end_with_the_run() -> None:
    halt = Fault(1.0, "stop", "buffer", 10.0)
    schedule = Schedule([halt], within_s=10.0)
    schedule.begin(halt, 1.0)
    assert schedule.ended(INFINITE) == [halt]
    assert schedule.ended(INFINITE) == []
    assert schedule.begun == [halt]
