"""A real run of configs/top-p.yaml, a few steps of it: kept ids from actor to learner, audited and replayed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.run_folder import RunFolder

ROOT = Path(__file__).parents[1]
SMALL = (
    "--actors.count 1 --actors.slots 16 --learner.steps 3 --learner.groups_per_step 4 --learner.group_size 4 "
    "--learner.checkpoint_every 2 --eval.tasks 0 --buffer.keep all"
)


def asyncrl(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.system
@pytest.mark.timeout(400)
def test_a_run_at_top_p_is_audited_and_replayed(tmp_path: Path, run: RunFolder) -> None:
    asyncrl("launch", "--config", "configs/top-p.yaml", "--launch.runs_dir", str(tmp_path), "--launch.name", "run",
            *SMALL.split())  # fmt: skip
    found: dict[str, list[float]] = {}
    for line in (run.path / "metrics.jsonl").read_text().splitlines():
        for name, value in json.loads(line).items():
            if name.startswith("correction/"):
                found.setdefault(name, []).append(value)
    assert len(found["correction/kept_ids"]) == 3
    assert min(found["correction/kept_ids"]) >= 1
    assert max(found["correction/beyond_max_kept"]) == 0
    assert max(found["correction/engine_mismatch_max"]) < 1e-4
    assert "every witness agrees" in asyncrl("audit", str(run.path))
    assert "bit-identical" in asyncrl("replay", str(run.path))
