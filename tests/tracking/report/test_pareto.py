"""The plot of a plan: drawn from plan.json, and in the report where there is one."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.report import pareto
from asyncrl.tracking.report.report import write_report


def point(bound: int, rate: float, staleness: float) -> dict[str, Any]:
    return {"setting": {"max_staleness": bound}, "mean": {"tokens_per_s": rate, "staleness_mean": staleness}}


PLAN = {
    "points": [point(0, 50.0, 0.0), point(1, 90.0, 0.5), point(2, 89.0, 1.0)],
    "front": [{"max_staleness": 1}, {"max_staleness": 0}],
    "recorded": point(2, 89.0, 1.0), "pick": point(1, 90.0, 0.5), "synchronous": None,
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = RunFolder.create(tmp_path / "run", Config())
    made.metrics.write_text("")
    return made


def test_the_points_the_front_and_the_names_are_those_of_the_plan(run: RunFolder) -> None:
    assert pareto.read(run.plan) is None
    run.plan.write_text(json.dumps(PLAN))
    played = pareto.read(run.plan)
    assert played is not None
    assert played.points == [(0.0, 50.0), (0.5, 90.0), (1.0, 89.0)]
    assert played.front == [(0.5, 90.0), (0.0, 50.0)]
    assert played.named == {"recorded": (1.0, 89.0), "pick": (0.5, 90.0)}


def test_the_report_holds_the_plot_of_a_plan(run: RunFolder) -> None:
    write_report(run)
    assert "asyncrl plan" not in run.report.read_text()
    run.plan.write_text(json.dumps(PLAN))
    write_report(run)
    picture = (run.plots / "plan.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert base64.b64encode(picture).decode() in run.report.read_text()


@pytest.mark.parametrize("text", ["{", "{}", json.dumps(PLAN | {"front": [{"max_staleness": 9}]})])
def test_a_file_that_is_no_plan_is_named_and_the_report_is_written(run: RunFolder, text: str) -> None:
    run.plan.write_text(text)
    write_report(run)
    assert "plan.json is not what asyncrl plan writes" in run.report.read_text()
    assert not (run.plots / "plan.png").exists()
