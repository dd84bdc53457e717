import math

import pytest

from asyncrl.config import Config
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.jsonl import JsonLines, by_step, read


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
