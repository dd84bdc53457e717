import math
import resource
import signal

import pytest

from asyncrl.config import Config
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.sinks.jsonl import JsonLines, by_step, read


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "r", Config())


def test_what_is_written_is_read_and_what_is_not_finite_is_null(run):
    sink = JsonLines(run)
    sink.record({"step": 1.0, "reward/mean": 0.123456789, "weights/loss": math.nan, "weights/grad_norm": math.inf})
    sink.close({})
    assert "NaN" not in run.metrics.read_text()
    (record,) = read(run.metrics)
    assert record["reward/mean"] == pytest.approx(0.123456789, rel=1e-5)
    assert math.isnan(record["weights/loss"])
    assert math.isnan(record["weights/grad_norm"])


def test_lines_of_one_step_complete_each_other(run):
    sink = JsonLines(run)
    for record in ({"step": 1.0, "a": 1.0}, {"step": 2.0, "a": 2.0}, {"step": 1.0, "a": 3.0, "b": 4.0}):
        sink.record(record)
    sink.close({})
    assert by_step(run.metrics) == [{"step": 1.0, "a": 3.0, "b": 4.0}, {"step": 2.0, "a": 2.0}]


def test_a_half_written_last_line_is_left_out_and_another_broken_one_is_named(run):
    run.metrics.write_text('{"step": 1}\n{"step": 2')
    assert list(read(run.metrics)) == [{"step": 1.0}]
    run.metrics.write_text('{"step": 1\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 1"):
        list(read(run.metrics))


def test_no_file_is_no_records(tmp_path):
    assert list(read(tmp_path / "metrics.jsonl")) == []


def test_what_comes_behind_half_a_line_is_whole(run):
    run.metrics.write_text('{"step": 1}\n{"step": 2')
    sink = JsonLines(run)
    sink.record({"step": 3.0})
    sink.close({})
    assert [record["step"] for record in read(run.metrics)] == [1.0, 3.0]


def test_of_a_line_that_the_disk_does_not_take_nothing_stays(run):
    sink = JsonLines(run)
    sink.record({"step": 1.0})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (run.metrics.stat().st_size + 5, before[1]))
        with pytest.raises(OSError, match=r"No space left|too large"):
            sink.record({"step": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    sink.record({"step": 3.0})
    sink.close({})
    assert [record["step"] for record in read(run.metrics)] == [1.0, 3.0]
