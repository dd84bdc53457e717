"""`asyncrl init` as a new user gives it: in an empty folder, then the commands that it names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.cli.test_cli import call, sentence

ROOT = Path(__file__).parents[2]
KINDS = ("tools", "single-turn", "agent")


def python(here: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(here)}
    return subprocess.run(
        [sys.executable, *words], cwd=here, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.system
@pytest.mark.parametrize("kind", KINDS)
def test_a_skeletons_own_test_and_its_trial_pass_in_an_empty_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = call(capsys, "init", "mine", "--kind", kind)
    assert code == 0
    next_lines = [line.strip() for line in out.splitlines() if line.startswith("  ")]
    assert next_lines[0] == "cd mine"
    assert {file.name for file in (tmp_path / "mine").iterdir()} > {"README.md", "train.yaml"}

    tested = python(tmp_path / "mine", *next_lines[1].split()[1:])
    assert tested.returncode == 0, tested.stderr
    assert tested.stdout.count("passed: ") >= 2
    tried = python(tmp_path / "mine", "-m", "asyncrl", "try", "--config", "train.yaml")
    assert tried.returncode == 0, tried.stderr
    assert "failed" not in tried.stdout
    assert "could not be parsed" not in tried.stdout


def test_a_test_of_a_skeleton_notices_a_broken_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind, file, right, wrong in (
        ("tools", "score.py", "== ground_truth", "!= ground_truth"),
        ("single-turn", "score.py", "answer == ground_truth", "True"),
        ("agent", "agent.py", "== truth", "!= truth"),
    ):
        folder = tmp_path / kind
        assert call(capsys, "init", str(folder), "--kind", kind)[0] == 0
        (folder / file).write_text((folder / file).read_text().replace(right, wrong))
        (test,) = folder.glob("test_*.py")
        assert python(folder, test.name).returncode != 0, kind


def test_no_file_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "score.py").write_text("mine")
    code, _, err = call(capsys, "init", str(tmp_path))
    assert code == 1
    assert "score.py" in sentence(err)
    assert [file.name for file in tmp_path.iterdir()] == ["score.py"]
    assert (tmp_path / "score.py").read_text() == "mine"


@pytest.mark.system
@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])])
def test_a_skeleton_trains_and_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    assert call(capsys, "init", str(tmp_path / "mine"), "--kind", kind)[0] == 0
    words = "launch --config train.yaml --launch.name first"
    done = python(tmp_path / "mine", "-m", "asyncrl", *words.split())
    assert done.returncode == 0, done.stdout + done.stderr
    from asyncrl.launch.run import open_run

    metrics = open_run(tmp_path / "mine" / "runs" / "first").metrics()
    reward = metrics["reward/mean"]
    reward = reward[~np.isnan(reward)]
    assert reward[-5:].mean() > reward[:3].mean() + 0.2
