"""When a run counts as stalled, and when the launcher acts on it."""

from __future__ import annotations

from asyncrl.launch.diagnosis.stall import StallWatch


def test_a_run_with_progress_is_left_alone() -> None:
    watch = StallWatch(stall_s=10.0, progress=0.0)
    for now in range(100):
        assert watch.look(float(now)) is None
        watch.progress = float(now)


def test_a_stall_is_reported_once_and_acted_on_when_the_stacks_are_written() -> None:
    watch = StallWatch(stall_s=10.0, progress=0.0)
    assert watch.look(10.0) is None
    assert watch.look(10.1) == "report"
    assert [watch.look(t, reporting=True) for t in (10.2, 30.0)] == [None, None]
    assert watch.look(31.0) == "act"
    assert watch.look(41.0) is None, "a restarted role gets as much time again"
    assert watch.look(41.1) == "report"


def test_a_run_that_goes_on_while_its_stacks_are_written_is_not_acted_on() -> None:
    watch = StallWatch(stall_s=10.0, progress=0.0)
    assert watch.look(10.1) == "report"
    watch.progress = 11.0
    assert watch.look(12.0) is None
    assert watch.look(21.1) == "report"
