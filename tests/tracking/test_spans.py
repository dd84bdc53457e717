"""Spans: sent by a reporter, checked, written by the collector, read back."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgpack
import pytest

from asyncrl.tracking import messages, spans
from asyncrl.tracking.spans import LAST_STEPS, Span, SpanLog
from asyncrl.wire import WireError


def write(log: SpanLog, step: int, name: str = "step") -> None:
    log.append("learner", [Span(name, 100.0 + step, 0.5, step)], step)


def marks(path: Path) -> list[int | None]:
    return [span.mark for _, span in spans.read(path)]


def test_the_file_holds_the_last_steps_and_at_most_twice_as_many(tmp_path: Path) -> None:
    log = SpanLog(tmp_path / "spans.jsonl", every=0)
    for step in range(5 * LAST_STEPS + 20):
        write(log, step)
        kept = marks(tmp_path / "spans.jsonl")
        assert kept[-LAST_STEPS:] == [*range(max(0, step + 1 - LAST_STEPS), step + 1)]
        assert len(kept) <= 2 * LAST_STEPS
    log.close()


def test_one_step_in_so_many_is_kept_for_the_whole_run(tmp_path: Path) -> None:
    log = SpanLog(tmp_path / "spans.jsonl", every=40)
    for step in range(200):
        write(log, step)
    log.close()
    assert marks(tmp_path / "spans.jsonl") == [0, 40, 80, 120, 160]


def test_a_run_that_goes_back_to_a_checkpoint_keeps_what_came_after_it(tmp_path: Path) -> None:
    log = SpanLog(tmp_path / "spans.jsonl", every=0)
    for step in (10, 11, 12, 4, 5):
        write(log, step)
    log.close()
    assert marks(tmp_path / "spans.jsonl") == [10, 11, 12, 4, 5]


def test_a_line_that_a_killed_launcher_left_unfinished_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    log = SpanLog(path, every=0)
    write(log, 1)
    log.close()
    path.write_bytes(path.read_bytes() + b'{"role": "lear')
    assert marks(path) == [1]
    again = SpanLog(path, every=0)
    write(again, 2)
    again.close()
    assert marks(path) == [1, 2]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    path.write_text('{"role": "learner", "spans": [["step", 1.0]]}\n')
    with pytest.raises(ValueError, match=r"spans\.jsonl, line 1, holds no spans"):
        list(spans.read(path))


def test_a_full_file_takes_no_more_and_counts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "MAX_BYTES", 200)
    log = SpanLog(tmp_path / "spans.jsonl", every=0)
    for step in range(20):
        write(log, step)
    log.close()
    assert log.left_out == 20 - len(marks(tmp_path / "spans.jsonl")) > 0


def report(listed: object) -> bytes:
    now = time.time()
    body = {
        "role": "learner", "pid": 1, "t": now, "kind": "spans", "spans": listed, "waits": {}, "cause": None, "on": "",
        "since": now, "lost": 0, "unknown": 0,
    }  # fmt: skip
    packed: bytes = msgpack.packb(body)
    return packed


def test_a_report_of_spans_is_taken_as_it_is() -> None:
    assert messages.decode(report([["step", 12.5, 0.5, None]]), 10)["spans"] == [["step", 12.5, 0.5, None]]


@pytest.mark.parametrize(
    "listed",
    [
        "step", [["step", 1.0, 0.5]], [["step", "now", 0.5, 1]], [["step", 1.0, float("nan"), 1]],
        [["step", 1.0, 2.0**40, 1]], [["step", 1.0, 0.5, -1]], [["s" * 200, 1.0, 0.5, 1]],
        [["step", 1.0, 0.5, 2**60]], [["step", 1.0, 0.5, 1]] * (messages.MAX_SPANS + 1),
    ],
    ids=lambda listed: json.dumps(listed)[:40],
)  # fmt: skip
def test_a_report_beyond_the_bounds_is_refused(listed: object) -> None:
    with pytest.raises(WireError, match="span"):
        messages.decode(report(listed), 10)
