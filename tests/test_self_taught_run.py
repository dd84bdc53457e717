"""`configs/self-distil.yaml` with the real processes: the policy learns from itself, shown the answer; its audit holds,
its replay is exact, and it goes on from a checkpoint."""

from __future__ import annotations

import json

import pytest

from asyncrl.learner.checkpoints.checkpoints import complete, read_list
from asyncrl.run_folder import RunFolder
from tests.test_taught_run import SMALL, said

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.timeout(900)]


def test_a_run_that_is_its_own_teacher(run: RunFolder) -> None:
    flags = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    place = ["--launch.runs-dir", str(run.path.parent), "--launch.name", run.name]
    code, text = said("launch", "--config", "configs/self-distil.yaml", *flags, *place)
    assert code == 0, text
    steps = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    taught = [step for step in steps if "teacher/reverse_kl" in step]
    assert len(taught) == 3
    assert all(step["teacher/reverse_kl"] > 1e-4 for step in taught), "what it is shown changes its mind"
    assert all(step["teacher/hinted"] == 1.0 and step["teacher/hint_tokens"] > 3 for step in taught)
    code, text = said("launch", "--resume", str(run.path), "--learner.steps", "5")
    assert code == 0, text
    code, text = said("audit", str(run.path))
    assert code == 0, text
    code, text = said("replay", str(run.path))
    assert code == 0, text
    assert "replay: 5 steps" in text
    assert "every one bit-identical" in text
    newest = complete(run.checkpoints)[-1]
    assert (newest / "teacher.pt").is_file()
    assert {done.teacher for done in read_list(newest)[1]} == {"policy, update_rate 0.05"}
    first = next(path for path in complete(run.checkpoints) if (path / "teacher.pt").is_file())
    (first / "teacher.pt").unlink()
    code, text = said("replay", str(run.path), "--from-step", str(int(first.name.rpartition("-")[2])))
    assert code != 0
    assert "teacher.pt" in text, text
    assert "Traceback" not in text
