"""The buffer's host is lost, its disk with it, in the middle of a run with the real processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.audit.command import audit
from asyncrl.launch.processes import kill_all, of_run
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.sinks.jsonl import by_step
from tests.waiting import until

ROOT = Path(__file__).parents[1]
SMALL = {
    "learner.groups_per_step": 4, "learner.group_size": 4, "learner.steps": 1000, "learner.checkpoint_every": 4,
    "buffer.capacity": 64, "buffer.lease_s": 6, "buffer.dir": "$LOCAL_DISK/ledger",
    "actors.count": 1, "actors.slots": 8, "eval.tasks": 0,
}  # fmt: skip


@pytest.fixture
def live(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], RunFolder]]:
    values = SMALL | {"launch.runs_dir": tmp_path, "launch.name": "run"} | getattr(request, "param", {})
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    launcher = subprocess.Popen(
        [sys.executable, "-m", "asyncrl", "launch", "--config", str(ROOT / "configs" / "quickstart.yaml"), *words],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, "LOCAL_DISK": str(tmp_path / "disk")},
    )  # fmt: skip
    run = RunFolder(tmp_path / "run")
    yield launcher, run
    launcher.kill()
    launcher.communicate(timeout=10)
    kill_all(of_run(run.id))
    run.remove_temporary()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_run_goes_on_as_a_new_branch_from_its_last_checkpoint(
    live: tuple[subprocess.Popen[str], RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, run = live
    assert until(lambda: len(list(run.checkpoints.glob("step-*"))) >= 2, 120.0), launcher.poll()
    os.kill(run.record()["processes"]["buffer"][0], signal.SIGKILL)
    shutil.rmtree(tmp_path / "disk")
    assert until(lambda: list(run.checkpoints.glob("step-*-br1")), 200.0), "no checkpoint of the new branch"
    stop(launcher)
    assert len(by_step(run.metrics)) > 8
    log = (run.logs / "buffer.log").read_text()
    assert "restored from" in log
    monkeypatch.setenv("LOCAL_DISK", str(tmp_path / "disk"))
    assert audit(run, step=None, format="json", out=run.path / "audit.json") == 0, (run.path / "audit.json").read_text()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("live", [{"learner.checkpoint_every": 1000}], indirect=True)
def test_before_the_first_checkpoint_the_run_begins_anew_as_a_new_branch(
    live: tuple[subprocess.Popen[str], RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, run = live
    assert until(lambda: run.metrics.is_file() and len(by_step(run.metrics)) >= 2, 120.0), launcher.poll()
    os.kill(run.record()["processes"]["buffer"][0], signal.SIGKILL)
    shutil.rmtree(tmp_path / "disk")
    events = run.path / "events.jsonl"
    again = re.compile(r'^(?=.*"published")(?=.*"branch": 1\b)(?=.*"step": 2\b)', re.MULTILINE)
    assert until(lambda: again.search(events.read_text()), 200.0), events.read_text()[-2000:]
    stop(launcher)
    assert (run.checkpoints / "branch").read_text() == "1\n"
    monkeypatch.setenv("LOCAL_DISK", str(tmp_path / "disk"))
    assert audit(run, step=None, format="json", out=run.path / "audit.json") == 0, (run.path / "audit.json").read_text()
    assert json.loads((run.path / "audit.json").read_text())["lost"]["host"] > 0


def stop(launcher: subprocess.Popen[str]) -> None:
    launcher.send_signal(signal.SIGINT)
    out, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 130, out
