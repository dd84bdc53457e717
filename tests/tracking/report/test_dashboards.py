import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.report.dashboards import make_workspace, newest, spec, workspace
from asyncrl.tracking.report.panels import DASHBOARD, THROUGHPUT, regex
from asyncrl.tracking.series import SERIES
from asyncrl.tracking.sinks.jsonl import JsonLines
from asyncrl.tracking.state import RunState
from tests.tracking.fake_run import fake_run, played


def panels_of(document):
    return {s["name"]: s["panels"] for s in document["section"]["panelBankConfig"]["sections"]}


def test_the_workspace_opens_on_reward_and_shows_every_panel():
    pytest.importorskip("wandb_workspaces")
    document = spec(workspace("p", "e"))
    found = panels_of(document)
    assert list(found) == list(DASHBOARD)
    assert next(iter(found)) == "Reward"
    assert len(found["Throughput"]) == len(THROUGHPUT)
    first = found["Throughput"][0]["config"]
    assert first["xAxis"] == "wall_s"
    assert first["metrics"] == ["throughput/tokens_generated_per_s", "throughput/tokens_trained_per_s"]


def test_a_panel_of_a_family_matches_its_members_and_nothing_else():
    pytest.importorskip("wandb_workspaces")
    shown = panels_of(spec(workspace("p", "e")))["Throughput"]
    waits = next(p for p in shown if "learner waits" in p["config"]["chartTitle"])
    pattern = re.compile(waits["config"]["metricRegex"])
    assert waits["config"]["useMetricRegex"]
    assert pattern.search("waits/learner/batch")
    assert not pattern.search("waits/actor/batch")
    assert not pattern.search("x/waits/learner/batch")
    assert re.fullmatch(regex("reward/mean"), "reward/mean")
    assert all(re.compile(regex(name)) for name in SERIES)


def test_offline_the_specification_goes_into_a_file(tmp_path):
    pytest.importorskip("wandb_workspaces")
    where = Path(make_workspace("p", save_to=tmp_path / "workspace.json"))
    assert list(panels_of(json.loads(where.read_text()))) == list(DASHBOARD)


def test_without_an_account_the_remedy_is_named(monkeypatch):
    wandb = pytest.importorskip("wandb")
    pytest.importorskip("wandb_workspaces")
    monkeypatch.setattr(wandb, "login", lambda **asked: False)
    with pytest.raises(RunError, match=r"wandb login.*--save-to FILE"):
        make_workspace("p")


def test_the_newest_run_is_the_one_started_last(tmp_path):
    with pytest.raises(RunError, match="holds no run"):
        newest(tmp_path)
    for i, name in enumerate(("b", "a")):
        run = RunFolder.create(tmp_path / name, Config())
        os.utime(run.path / "run.json", (100 + i, 100 + i))
    assert newest(tmp_path).name == "a"


def test_the_local_dashboard_shows_a_run_whose_sink_was_off(tmp_path):
    pytest.importorskip("trackio")
    run = RunFolder.create(tmp_path / "runs" / "r", Config())
    sink = JsonLines(run)
    for record in played(RunState(0.0, 3, 2), fake_run(3)):
        sink.record(record)
    sink.close({})
    program = (
        "import sys; from pathlib import Path; from asyncrl.tracking.report.dashboards import dashboard;"
        "sys.exit(dashboard(sys.argv[1], browser=False))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(run.path)], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    try:
        line = next(text for text in process.stdout if text.startswith("r: http://127.0.0.1"))
        address = line.split()[1]
        with urllib.request.urlopen(address, timeout=10) as reply:
            assert reply.status == 200
        listed = urllib.request.Request(
            address.rstrip("/") + "/api/get_runs_for_project", data=b'{"project": "asyncrl"}',
            headers={"Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(listed, timeout=10) as reply:
            assert '"r"' in reply.read().decode()
    finally:
        process.kill()
        process.wait(10)
