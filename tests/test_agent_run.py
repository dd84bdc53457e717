"""The example of docs/how-to/agents.md, trained with the real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = {
    "learner.steps": 4,
    "learner.groups-per-step": 4,
    "learner.group-size": 4,
    "buffer.capacity": 64,
    "actors.slots": 16,
    "eval.tasks": 8,
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_agent_written_with_the_openai_client_is_trained(tmp_path: Path) -> None:
    fields = {"launch.runs-dir": tmp_path, "launch.name": "run"} | SMALL
    words = [word for name, value in fields.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl", "launch", "--config", "configs/agent-openai.yaml", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["outcome"], summary["steps"], summary["restarts"]) == ("finished", 4, {})
    assert 0.2 < summary["held_out_success_start"] < 1.0, "the quickstart's model calls tools from the start"
    assert summary["tokens_trained"] > 0
