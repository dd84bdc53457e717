"""A run whose groups are compared: an actor is killed dead on the way, the audit holds, each group is one actor's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncrl.audit.reading import read_ledger
from asyncrl.launch.processes import kill_all, of_run
from asyncrl.run_folder import RunFolder

COMPARE = """
def compare(task, answers):
    return [float(place) for place, _ in enumerate(answers)]
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_groups_are_compared_whole_also_when_an_actor_is_killed(tmp_path: Path) -> None:
    (tmp_path / "compare.py").write_text(COMPARE)
    run = RunFolder(tmp_path / "run")
    flags = {
        "launch.runs-dir": tmp_path, "launch.name": "run", "env.group-score": f"{tmp_path}/compare.py:compare",
        "learner.steps": 8, "learner.groups-per-step": 4, "learner.group-size": 4, "learner.checkpoint-every": 4,
        "buffer.capacity": 64, "buffer.lease-s": 5, "actors.count": 2, "actors.slots": 3, "eval.tasks": 4,
    }  # fmt: skip
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    launched = subprocess.Popen([sys.executable, "-m", "asyncrl", "launch", *words])
    try:
        deadline = time.monotonic() + 200
        while not (run.metrics.is_file() and '"step"' in run.metrics.read_text()):
            assert time.monotonic() < deadline, "no training step"
            assert launched.poll() is None
            time.sleep(0.2)
        os.kill(run.record()["processes"]["actor-0"][0], signal.SIGKILL)
        assert launched.wait(300) == 0
    finally:
        launched.kill()
        launched.wait()
        if (run.path / "run.json").is_file():
            kill_all(of_run(run.id))
    audit = subprocess.run(
        [sys.executable, "-m", "asyncrl", "audit", str(run.path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert audit.returncode == 0, audit.stdout
    assert json.loads(run.summary.read_text())["restarts"] == {"actor-0": 1}
    ledger = read_ledger(run.ledger(run.load_config()))
    trained = [number for batch in ledger.line for number in batch.groups]
    assert len(trained) == 32
    for number in trained:
        members = ledger.members[number]
        assert len({row.actor for row in members}) == 1
        # The environment's own reward is 0 or 1; the place in the group is added.
        assert [row.reward - row.index in (0.0, 1.0) for row in members] == [True] * 4
