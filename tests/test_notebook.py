"""examples/quickstart.ipynb, every cell in order, in a process of its own and a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
END = """
assert summary["outcome"] == "finished", summary
assert summary["steps"] == config.learner.steps
assert summary["held_out_success_end"] > summary["held_out_success_start"] + 0.3, summary
assert rollouts[0].step < rollouts[-1].step
assert all(0 < len(rollout.text) for rollout in rollouts)
assert len(plt.gca().lines) >= 2
"""


def cells() -> list[str]:
    return ["".join(c["source"]) for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]


def test_it_is_stored_without_outputs() -> None:
    stored = [c for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]
    assert all(not c["outputs"] and c["execution_count"] is None for c in stored)
    for source in cells():
        compile(source, "cell", "exec")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_cell_runs(tmp_path: Path) -> None:
    script = tmp_path / "cells.py"
    # Without a screen `show` does nothing, and the figure stays for the checks.
    script.write_text("\n\n".join([*cells(), END]))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    ended = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=850
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
