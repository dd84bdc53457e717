"""A model that was just trained for a few steps, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def train(folder: Path) -> Path:
    """The `hf/` of the last checkpoint of a run in `folder`."""
    words = (
        "launch --config quickstart --launch.name first --learner.steps 3 --learner.checkpoint-every 3 --eval.tasks 0"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl", *words.split()],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / "first" / "checkpoints" / "step-000003" / "hf"
