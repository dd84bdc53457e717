"""Exports of evaluated weights: the best stay, a redo writes what is missing, and nothing resumes from them."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.buffer.client import EvalReply
from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.learner.checkpoints import exports as exports_module
from asyncrl.learner.checkpoints.checkpoints import complete
from tests.learner.fake_buffer import FakeBuffer, FakeReporter
from tests.learner.test_loop import Killed, a_config, a_learner
from tests.waiting import until

SHARES = {0: 0.25, 1: 0.5, 2: 0.75, 3: 0.5, 4: 0.75}
"""Success by version: that of version 2 is the first of the highest."""


class FakeChoosingBuffer(FakeBuffer):
    """Evaluates every version; its results come at the look behind the next one."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.eval_every = 1

    def evaluation(self, *, everyone: bool = False, lost: tuple[int, int] | None = None) -> EvalReply:
        undecided = list(self.open)
        reply = super().evaluation(everyone=everyone, lost=lost)
        self.play_evaluation()
        told = [each for each in self.done if (each.branch, each.due) not in undecided]
        line = {e.due: (e.branch, e.due, SHARES[e.due]) for e in told}  # the later branch counts
        results = sorted(line.values(), key=lambda r: (-r[2], r[1]))
        return dataclasses.replace(reply, undecided=undecided, results=results)


def choosing(**learner: Any) -> Config:
    changed = {"eval": {"tasks": 4, "every": 1, "keep_best": "held_out"}, "model": {"path": "quickstart"}}
    return Config.model_validate(a_config(**learner).model_dump() | changed)


def there(folder: Path) -> set[str]:
    return {path.name for path in (folder / "exports").iterdir()}


def test_the_best_export_stays_and_holds_the_weights_of_its_version(tmp_path: Path) -> None:
    buffer, reporter = FakeChoosingBuffer(4), FakeReporter()
    learner, backend = a_learner(choosing(), tmp_path, buffer, reporter)
    at: dict[int, dict[str, torch.Tensor]] = {}
    buffer.on_batch = lambda b: at.setdefault(b, {name: t.clone() for name, t in backend.weights()})
    learner.run(resume=False)
    assert there(tmp_path) == {"step-000002", "best.json"}
    about = json.loads((tmp_path / "exports" / "best.json").read_text())
    assert about == {
        "export": "step-000002", "branch": 0, "version": 2, "keep_best": "held_out", "success": 0.75,
    }  # fmt: skip
    folder = tmp_path / "exports" / "step-000002" / "hf"
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= {f.name for f in folder.iterdir()}
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    stored = {name: t for file in set(index.values()) for name, t in load_file(folder / file).items()}
    assert stored.keys() == at[2].keys()
    assert all(torch.equal(stored[name], at[2][name]) for name in stored)
    assert [p.name for p in complete(tmp_path / "checkpoints")] == ["step-000002", "step-000004"]


@pytest.mark.parametrize("how", ["killed while it wrote", "removed"])
def test_a_redo_writes_again_what_is_missing_and_nothing_resumes_from_an_export(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies behind version 2, of which the export is not complete; or behind version 3, and begins again at 1."""
    buffer, config = FakeChoosingBuffer(4), choosing(checkpoint_every=1, keep_checkpoints=9)
    last = 3 if how == "removed" else 2

    def die(b: int) -> None:
        if b == last:
            raise Killed

    buffer.on_batch = die
    learner, _ = a_learner(config, tmp_path, buffer, FakeReporter())
    dead = threading.Event()
    if how != "removed":
        written = exports_module.write_weights

        def dies(named: Any, folder: Path) -> None:
            if folder.parent.name == ".unfinished-step-000002":
                dead.set()
                raise SystemExit  # ends the thread alone: nothing behind it is written
            written(named, folder)

        monkeypatch.setattr(exports_module, "write_weights", dies)
    with pytest.raises(Killed):
        learner.run(resume=False)
    assert how == "removed" or dead.wait(60.0)  # the writing may begin later than the learner's death
    monkeypatch.undo()
    assert until(lambda: (tmp_path / "checkpoints" / f"step-{last:06d}").is_dir(), 20.0)
    if how == "removed":
        shutil.rmtree(tmp_path / "exports" / "step-000002")
        for name in ("step-000002", "step-000003"):
            shutil.rmtree(tmp_path / "checkpoints" / name)
    assert "step-000002" not in there(tmp_path)
    buffer.on_batch = None
    learner, _ = a_learner(config, tmp_path, buffer, reporter := FakeReporter())
    learner.run(resume=True)
    resumed = [Path(fields["checkpoint"]).name for fields in reporter.of("resumed")]
    assert resumed == ["step-000001" if how == "removed" else "step-000002"]
    assert "step-000002" in there(tmp_path)
    assert not [name for name in there(tmp_path) if name.startswith(".")]


def test_the_weights_at_which_a_branch_begins_are_exported_before_the_next_step(tmp_path: Path) -> None:
    """The buffer has begun it; the learner hears of it when it asks for a batch, and publishes these weights again."""
    buffer = FakeChoosingBuffer(4)

    def branch(b: int) -> None:
        buffer.branch = int(b >= 2)

    buffer.on_batch = branch
    learner, _ = a_learner(choosing(), tmp_path, buffer, FakeReporter())
    learner.run(resume=False)
    assert json.loads((tmp_path / "exports" / "best.json").read_text())["export"] == "step-000002-br1"
    assert there(tmp_path) == {"step-000002-br1", "best.json"}


def test_a_full_disk_ends_the_run_with_the_field_to_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(named: Any, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exports_module, "write_weights", full)
    learner, _ = a_learner(choosing(), tmp_path, FakeChoosingBuffer(4), FakeReporter())
    with pytest.raises(RunError, match=r"step-00000\d cannot be written: No space left .* eval.keep_best empty"):
        learner.run(resume=False)
    assert not [name for name in there(tmp_path) if name.startswith(".")]
