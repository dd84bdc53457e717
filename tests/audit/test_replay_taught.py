"""A run that learned from a teacher: its replay is exact, and another teacher is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.audit.command import audit
from asyncrl.audit.replay import replay
from asyncrl.errors import RunError
from asyncrl.learner.checkpoints.checkpoints import complete, read_list
from asyncrl.run_folder import RunFolder
from tests.audit.real_run import STEPS, make_run
from tests.learner.distillation.teachers import teacher_in


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, Path]:
    """The run, and its teacher."""
    folder = tmp_path_factory.mktemp("taught")
    teacher = teacher_in(folder / "teacher")
    return make_run(folder, teacher=teacher), teacher


@pytest.mark.system
def test_the_weights_are_the_same_bit_for_bit(
    taught: tuple[RunFolder, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = taught
    assert replay(run) == 0
    assert f"replay: {STEPS} steps" in capsys.readouterr().out
    assert audit(run) == 0
    done = read_list(complete(run.checkpoints)[-1])[1]
    assert len({d.teacher for d in done}) == 1
    assert len(done[0].teacher) == 32, "the digest of the teacher stands beside every batch"


def test_another_teacher_is_refused_by_name(taught: tuple[RunFolder, Path]) -> None:
    run, teacher = taught
    file = teacher / "model.safetensors"
    whole = file.read_bytes()
    weights = {name: x.clone() for name, x in load_file(file).items()}
    with torch.no_grad():
        weights["lm_head.weight"][7, 3] += 1e-3
    try:
        save_file(weights, file, {"format": "pt"})
        with pytest.raises(RunError, match=r"the teacher in learner\.teacher\.path \(.*teacher\) has the digest"):
            replay(run)
    finally:
        file.write_bytes(whole)
