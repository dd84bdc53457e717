"""`--probe`: a real run that is stopped in time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import asyncrl
from asyncrl.errors import RunError
from asyncrl.launch.processes import of_run
from asyncrl.plan.probe import probe

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]
SMALL = {
    "learner.groups_per_step": 2, "learner.group_size": 2, "learner.steps": 100_000, "buffer.capacity": 32,
    "actors.count": 1, "actors.slots": 4, "eval.tasks": 20, "actors.drain_s": 0.0,
}  # fmt: skip


def test_a_probe_trains_and_ends_in_order(tmp_path: Path) -> None:
    run = probe(asyncrl.Config.load("quickstart", SMALL | {"launch.runs_dir": str(tmp_path)}), 1.0)
    summary = json.loads(run.summary.read_text())
    assert summary["outcome"] == "interrupted"
    assert summary["steps"] >= 1
    assert summary["held_out_success_start"] is None
    assert of_run(run.id) == []


def test_a_probe_that_cannot_begin_says_why(tmp_path: Path) -> None:
    changes = {"launch.runs_dir": str(tmp_path), "env.options": {"tool_latency_s": "never"}, "launch.try_reset": True}
    with pytest.raises(RunError, match=r"the probe of 1 s failed: no first training step: .*tool_latency_s"):
        probe(asyncrl.Config.load("quickstart", SMALL | changes), 1.0)
