"""The timeline: turns within episodes, slots, nesting, arrows; read back as Perfetto would."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.trace.command import write
from asyncrl.trace.timeline import Arrow, Instant, Slice, Timeline, evaluations, nested, turn_slices
from asyncrl.trajectory import TurnRecord
from tests.trace.reader import check_nesting, read_trace

EPISODE = Slice("actor-0", "slot 0", "episode 0.7.1", 100.0, 110.0, {"ended": "stored"})
TURNS = [TurnRecord(0.5, 2.0, 1.0, 10, 5), TurnRecord(None, 3.0, None, 4, 5)]


def test_turns_end_with_their_episode_in_order() -> None:
    assert [(s.name, s.begin, s.end) for s in turn_slices(EPISODE, TURNS)] == [
        ("generate", 104.0, 106.0), ("queue", 104.0, 104.5), ("environment", 106.0, 107.0), ("generate", 107.0, 110.0),
    ]  # fmt: skip


def test_turns_that_claim_more_time_than_their_episode_had_are_cut_to_it() -> None:
    found = list(turn_slices(EPISODE, [TurnRecord(1.0, 30.0, 2.0, 1, 1)]))
    assert [(s.name, s.begin, s.end) for s in found] == [
        ("generate", 100.0, 108.0), ("queue", 100.0, 101.0), ("environment", 108.0, 110.0),
    ]  # fmt: skip


def test_a_part_that_ends_microseconds_behind_its_step_is_cut() -> None:
    parts = [Slice("learner", "step", "optimizer", 1.5, 2.000004), Slice("learner", "step", "step", 1.0, 2.0)]
    assert [(s.name, s.end) for s in nested(parts)] == [("step", 2.0), ("optimizer", 2.0)]


def test_a_step_that_begins_within_the_one_before_begins_with_its_end_and_so_do_its_parts() -> None:
    """The clock was set back by a millisecond between them."""
    steps = [
        Slice("learner", "step", "step", 1.0, 2.0), Slice("learner", "step", "optimizer", 1.9, 2.0),
        Slice("learner", "step", "step", 1.999, 3.0), Slice("learner", "step", "prepare", 1.999, 2.5),
        Slice("learner", "step", "optimizer", 2.5, 3.0),
    ]  # fmt: skip
    assert [(s.name, s.begin, s.end) for s in nested(steps)] == [
        ("step", 1.0, 2.0), ("optimizer", 1.9, 2.0), ("step", 2.0, 3.0), ("prepare", 2.0, 2.5), ("optimizer", 2.5, 3.0),
    ]  # fmt: skip


def test_each_held_out_set_has_a_track_with_its_evaluations_within_the_time() -> None:
    names = ("name", "due", "version", "branch", "on_branch", "state", "opened_at", "ended_at")
    told = [
        ("dev", 10, 10, 0, 0, "done", 50.0, 99.0), ("dev", 20, 20, 0, 0, "done", 95.0, 104.0),
        ("hard", 20, 20, 0, 0, "restarted", 95.0, 103.0), ("hard", 20, 25, 0, 0, "open", 103.0, None),
        ("dev", 30, 30, 0, 0, "skipped", 106.0, 106.0), ("dev", 40, 40, 0, 0, "open", 111.0, None),
    ]  # fmt: skip
    rows = [dict(zip(names, row, strict=True)) for row in told]
    found = list(evaluations(rows, begin=100.0, end=110.0))
    assert [(s.process, s.lane, s.name, s.begin, s.end) for s in found] == [
        ("evaluation", "dev", "dev at 20", 95.0, 104.0), ("evaluation", "hard", "hard at 20", 95.0, 103.0),
        ("evaluation", "hard", "hard at 20", 103.0, 110.0),
    ]  # fmt: skip
    assert [(s.arguments["version"], s.arguments["ended"]) for s in found] == [
        (20, "done"), (20, "restarted"), (25, "open")
    ]  # fmt: skip


def test_the_file_is_read_back_with_its_nesting_and_both_ends_of_every_arrow(tmp_path: Path) -> None:
    batch = Slice("learner", "batches", "batch 3", 111.0, 112.5)
    slices = [EPISODE, *turn_slices(EPISODE, TURNS), batch]
    written = Timeline(slices, [Arrow(EPISODE, batch)], [Instant("version 4 published", 112.5)])
    for name in ("trace.json", "trace.json.gz"):
        write(tmp_path / name, written)
        read = read_trace(tmp_path / name)
        assert [(a["name"], b["name"]) for a, b in read.arrows] == [("episode 0.7.1", "batch 3")]
        assert sum(s["dur"] for s in read.slices if s["name"] == "generate") == pytest.approx(5e6)
        assert read.of("learner", "batch 3")[0]["begin"] == pytest.approx(11.0)
        assert [i["name"] for i in read.instants] == ["version 4 published"]


def test_the_reader_notices_slices_that_overlap() -> None:
    """Of the check above: what it would notice."""
    common = {"ph": "X", "process": "a", "lane": "b"}
    with pytest.raises(AssertionError):
        check_nesting([common | {"ts": 0.0, "dur": 10.0}, common | {"ts": 5.0, "dur": 10.0}])
