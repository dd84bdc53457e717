"""Each adapter's config trains a few steps with the real processes and the real package: no download, CPU only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.launch.processes import kill_all, of_run
from asyncrl.run_folder import RunFolder

ROOT = Path(__file__).parents[1]

GYMS = os.environ.get("ASYNCRL_GYMS_PYTHON", "")
VERIFIERS = os.environ.get("ASYNCRL_VERIFIERS_PYTHON", "")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name", ["reasoning-gym", "mcp", "mix", "text-gym", "nemo-gym", "calculator", "python-tool", "gigpo"]
)
def test_an_adapters_config_trains(name: str, tmp_path: Path) -> None:
    train(f"configs/{name}.yaml", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(
    not VERIFIERS, reason="ASYNCRL_VERIFIERS_PYTHON names no Python with verifiers: make test-verifiers"
)
def test_a_taskset_of_verifiers_trains(tmp_path: Path) -> None:
    text = (ROOT / "configs/verifiers.yaml").read_text().replace(".venv-verifiers/bin/python", VERIFIERS)
    (tmp_path / "verifiers.yaml").write_text(text)
    train(str(tmp_path / "verifiers.yaml"), tmp_path, PYTHONPATH=str(ROOT / "examples"))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not GYMS, reason="ASYNCRL_GYMS_PYTHON names no Python with the gyms: make test-gyms")
def test_an_environment_of_openenv_trains(tmp_path: Path) -> None:
    text = (ROOT / "configs/openenv.yaml").read_text().replace(".venv-gyms/bin/python", GYMS)
    (tmp_path / "openenv.yaml").write_text(text)
    train(str(tmp_path / "openenv.yaml"), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not GYMS, reason="ASYNCRL_GYMS_PYTHON names no Python with the gyms: make test-gyms")
@pytest.mark.parametrize(("gym", "game"), [("gem", "game:GuessTheNumber-v0-easy"), ("textarena", "GuessTheNumber-v0")])
def test_a_game_of_a_gym_trains(gym: str, game: str, tmp_path: Path) -> None:
    # The tiny model reads 256 tokens, a token a letter: of the rules it sees the beginning.
    options = f"{{gym: {gym}, game: '{game}', python: {GYMS}, max_chars: 60}}"
    text = (ROOT / "configs/text-gym.yaml").read_text().replace('{gym: "../examples/text_game.py:Guess"}', options)
    (tmp_path / "text-gym.yaml").write_text(text)
    train(str(tmp_path / "text-gym.yaml"), tmp_path)


def train(config: str, tmp_path: Path, **environment: str) -> None:
    run = RunFolder(tmp_path / "run")
    words = ["--config", config, "--launch.runs-dir", str(tmp_path), "--launch.name", "run"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "asyncrl", "launch", *words],
            cwd=ROOT, capture_output=True, text=True, timeout=380, check=False, env=os.environ | environment,
        )  # fmt: skip
    finally:
        if (run.path / "run.json").is_file():
            kill_all(of_run(run.id))
    logs = "".join(log.read_text()[-3000:] for log in run.logs.glob("*.log"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + logs
    summary = json.loads(run.summary.read_text())
    assert (summary["outcome"], summary["restarts"]) == ("finished", {})
    assert summary["tokens_trained"] > 0
    assert "env_error" not in logs, "an episode failed"
