"""A run whose teacher is an average of its policy: audit and replay, from the start and from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.audit.command import audit
from asyncrl.audit.replay import replay
from asyncrl.errors import RunError
from asyncrl.learner.backends.hf.moving import FILE, MovingTeacher
from asyncrl.learner.checkpoints.checkpoints import complete, read_list
from asyncrl.run_folder import RunFolder
from tests.audit.real_run import SECTIONS, STEPS, make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    teacher = {"path": "policy", "update_rate": 0.3, "shown": "nothing", "reward_weight": 1.0}
    learner = SECTIONS["learner"] | {"teacher": teacher}
    return make_run(tmp_path_factory.mktemp("average"), sections=SECTIONS | {"learner": learner})


@pytest.mark.parametrize("step", [0, 2])
def test_the_weights_are_the_same_bit_for_bit(run: RunFolder, step: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(run, from_step=step) == 0
    assert f"replay: {STEPS - step} steps" in capsys.readouterr().out
    assert audit(run) == 0
    done = read_list(complete(run.checkpoints)[-1])[1]
    assert {d.teacher for d in done} == {"policy, update_rate 0.3"}


def test_another_average_gives_other_weights(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = MovingTeacher.load
    monkeypatch.setattr(
        MovingTeacher, "load", lambda self, state: load(self, {name: x * 1.001 for name, x in state.items()})
    )
    assert replay(run, from_step=2) == 1
    assert "DIFFERENT from step 2 on" in capsys.readouterr().out, "the teacher itself is compared"


def test_a_damaged_average_is_refused(run: RunFolder) -> None:
    (checkpoint,) = (path for path in complete(run.checkpoints) if read_list(path)[0].version == 2)
    file: Path = checkpoint / FILE
    whole = file.read_bytes()
    try:
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(RunError, match=FILE):
            replay(run, from_step=2)
    finally:
        file.write_bytes(whole)
