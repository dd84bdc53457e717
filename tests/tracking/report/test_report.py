import base64
import doctest
import math
import re
import subprocess
import sys

import pytest

from asyncrl.config import Config
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.report import panels as panels_module
from asyncrl.tracking.report import plots
from asyncrl.tracking.report.panels import DASHBOARD, Panel, members
from asyncrl.tracking.report.report import FIRST, page, write_report
from asyncrl.tracking.series import SECTIONS, SERIES
from asyncrl.tracking.sinks.jsonl import JsonLines, by_step
from asyncrl.tracking.state import RunState
from tests.tracking.fake_run import fake_run, played


@pytest.fixture
def run(tmp_path):
    run = RunFolder.create(tmp_path / "r<1>", Config())
    sink = JsonLines(run)
    for record in played(RunState(0.0, 12, 2), fake_run(12)):
        sink.record(record)
    sink.close({})
    return run


@pytest.mark.system
def test_the_report_is_made_from_metrics_alone_and_holds_its_pictures(run):
    (run.path / "run.json").unlink()
    run.config.unlink()
    assert write_report(run) == 0
    text = run.report.read_text()
    for slug in FIRST:
        picture = (run.plots / f"{slug}.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert base64.b64encode(picture).decode() in text, slug
    assert "r&lt;1&gt;" in text
    assert "31.0% &rarr; <b>93.0%</b>" in text
    assert text.index("What dropping does") < text.index("<img"), "drop bias stands above the curves"
    assert not re.search(r"(src|href)=['\"]?(http|//)", text), "nothing is fetched"


@pytest.mark.system
def test_a_report_that_takes_too_long_leaves_plots_out_and_says_so(run):
    asked = iter([False, False] + [True] * 99)
    left_out = write_report(run, lambda: next(asked))
    drawn = sorted(run.plots.glob("*.png"))
    assert 0 < len(drawn) <= 2
    assert {path.stem for path in drawn} <= set(FIRST), "those of the first screen come first"
    text = run.report.read_text()
    assert f"{left_out} curves were left out" in text
    assert "asyncrl report RUN" in text
    assert "31.0% &rarr; <b>93.0%</b>" in text, "the numbers are there"
    cli_report = [sys.executable, "-m", "asyncrl", "report", str(run.path)]
    done = subprocess.run(cli_report, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == str(run.report)
    assert "left out" not in run.report.read_text()
    assert len(list(run.plots.glob("*.png"))) > 2


def test_a_policy_that_starves_long_episodes_is_marked(run):
    records = by_step(run.metrics)
    assert "class=bad" not in page("x", records, {})
    records[-1]["buffer/length/trained"] = 0.8 * records[-1]["buffer/length/generated"]
    assert "<span class=bad>-20.0%</span>" in page("x", records, {})


def test_a_run_without_a_step_has_a_report_that_says_so(tmp_path):
    run = RunFolder.create(tmp_path / "r", Config())
    write_report(run)
    assert "No training step was recorded" in run.report.read_text()


def test_a_value_that_is_not_finite_leaves_a_gap_and_no_error():
    (panel,) = (p for p in DASHBOARD["Reward"] if p.slug == "reward")
    records = [{"step": float(i), "reward/mean": math.nan if i == 2 else 0.5} for i in range(4)]
    assert plots.draw(panel, records, {"step", "reward/mean"}).startswith(b"\x89PNG")
    assert plots.draw(panel, records[2:3], {"step", "reward/mean"}) is None


def test_panels_name_only_series_of_the_table_and_miss_no_section():
    shown = [p for panels in DASHBOARD.values() for p in panels]
    assert len({p.slug for p in shown}) == len(shown)
    for panel in shown:
        assert set(panel.series) <= set(SERIES), panel.slug
    assert {SERIES[name].section for p in shown for name in p.series} == set(SECTIONS)
    assert set(FIRST) <= {p.slug for p in shown}


def test_members_of_a_family_come_in_the_order_of_the_table():
    known = {"staleness/in_queue/16_up", "staleness/in_queue/2", "staleness/in_queue/0", "staleness/in_flight/0"}
    assert members("staleness/in_queue/{bucket}", known) == [f"staleness/in_queue/{b}" for b in ("0", "2", "16_up")]
    assert members("waits/actor/{cause}", {"waits/actor/x", "waits/learner/x"}) == ["waits/actor/x"]


def test_a_panel_without_data_is_no_picture():
    assert plots.draw(Panel("x", "X", "", ("reward/mean",)), [{"step": 1.0}], {"step"}) is None


def test_docstrings():
    assert doctest.testmod(plots).failed == 0
    assert doctest.testmod(panels_module).failed == 0
