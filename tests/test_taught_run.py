"""`configs/distil.yaml` with the real processes: it learns from its teacher, its replay is exact, and another teacher
is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.model import QUICKSTART
from asyncrl.run_folder import RunFolder

ROOT = Path(__file__).parents[1]
DEADLINE_S = 240.0
SMALL = {
    "learner.groups_per_step": 8, "learner.steps": 3, "learner.checkpoint_every": 2, "learner.warmup_steps": 0,
    "buffer.capacity": 64, "buffer.keep": "all", "actors.count": 1, "actors.slots": 8, "eval.tasks": 0,
}  # fmt: skip
# Of several ranks no run is replayed.
DIVIDED = {"learner.backend": "megatron", "learner.ranks": 2, "learner.backend-options": '{"tensor_parallel": 2}'}

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


def teacher_in(folder: Path) -> Path:
    """The quickstart's model, with another head."""
    shutil.copytree(QUICKSTART, folder)
    blur(folder, 0.5)
    return folder


def blur(teacher: Path, factor: float) -> None:
    file = teacher / "model.safetensors"
    weights = {name: x.clone() for name, x in load_file(file).items()}
    with torch.no_grad():
        weights["model.norm.weight"] *= factor
    save_file(weights, file, {"format": "pt"})


def said(*words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl", *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, timeout=DEADLINE_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.parametrize("learner", [{}, pytest.param(DIVIDED, marks=pytest.mark.slow)], ids=["torch", "megatron"])
def test_a_taught_run(run: RunFolder, tmp_path: Path, learner: dict[str, object]) -> None:
    if learner:
        pytest.importorskip("megatron.core", reason="the extra megatron is not installed")
    teacher = teacher_in(tmp_path / "teacher")
    flags = [word for name, value in (SMALL | learner).items() for word in (f"--{name}", str(value))]
    place = ["--launch.runs-dir", str(run.path.parent), "--launch.name", run.name]
    code, text = said(
        "launch", "--config", "configs/distil.yaml", "--learner.teacher.path", str(teacher), *flags, *place
    )
    assert code == 0, text
    steps = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    distance = [step["teacher/reverse_kl"] for step in steps if "teacher/reverse_kl" in step]
    assert len(distance) == 3
    assert all(x > 1e-3 for x in distance)
    assert {"teacher/agreement", "teacher/reverse_kl_by_turn/1"} <= {name for step in steps for name in step}
    code, text = said("audit", str(run.path))
    assert code == 0, text
    if not learner:
        replayed_exactly(run)
    blur(teacher, 1.01)
    if not learner:
        code, text = said("replay", str(run.path))
        assert code != 0
        assert "has the digest" in text, text
    code, text = said("launch", "--resume", str(run.path), "--learner.steps", "5")
    assert code != 0
    assert "has the digest" in text, text
    assert "Traceback" not in text


def replayed_exactly(run: RunFolder) -> None:
    code, text = said("replay", str(run.path))
    assert code == 0, text
    assert "replay: 3 steps" in text
    assert "every one bit-identical" in text
