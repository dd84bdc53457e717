"""What users bring: the ready configs, a gsm8k-shaped parquet and a verl-style reward file, trained on as they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.cli import main
from asyncrl.config import Config
from asyncrl.launch.api import prepare
from asyncrl.launch.processes import kill_all, of_run
from asyncrl.learner.build import builder_of, objective_of
from asyncrl.run_folder import RunFolder

CONFIGS = Path(__file__).parents[1] / "configs"

REWARDS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "openai/gsm8k" and ground_truth == str(2 * extra_info["index"])
    if extra_info["index"] == 3:
        raise ValueError("this row is broken")
    return {"score": float(len(solution_str) % 2), "acc": float(solution_str.strip() == ground_truth)}
"""

CONFIG = """
data:
  source: datasets
  options: {path: data/train.parquet, held_out_path: data/test.parquet, max_prompt_tokens: 128}
  curriculum: by_success
env:
  name: single_turn
  options: {score: "rewards.py:compute_score"}
  max_turns: 1
  max_tokens: 192
actors: {slots: 16, max_new_tokens: 16}
buffer: {capacity: 64}
learner: {groups_per_step: 4, group_size: 4, lr: 1e-4, checkpoint_every: 2}
eval: {tasks: 4, success: acc}
"""


@pytest.mark.parametrize("name", ["gsm8k-qwen3-0.6b", "tools-qwen3-4b", "code-qwen3-8b"])
def test_the_ready_configs_pass_what_needs_neither_their_data_nor_their_engine(name: str) -> None:
    config = Config.load(CONFIGS / f"{name}.yaml", {})
    prepare(config, checks="names")
    objective_of(config), builder_of(config)


def gsm8k_shaped(count: int, split: str, first: int) -> list[dict[str, Any]]:
    return [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What is {i} + {i}?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
            "extra_info": {"split": split, "index": i, "answer": f"#### {2 * i}", "question": ""},
        }
        for i in range(first, first + count)
    ]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    project = tmp_path / "project"
    (project / "data").mkdir(parents=True)
    for name, rows in (("train", gsm8k_shaped(12, "train", 0)), ("test", gsm8k_shaped(4, "test", 50))):
        pq.write_table(pa.Table.from_pylist(rows), project / "data" / f"{name}.parquet")
    (project / "rewards.py").write_text(REWARDS)
    (project / "config.yaml").write_text(CONFIG)
    return project


def test_what_is_wrong_with_the_data_is_said_before_anything_starts(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(
            [
                "launch",
                "--config",
                "project/config.yaml",
                "--data.options",
                "{path: project/data/train.parquet, where: {ability: art}}",
            ]
        )
    assert end.value.code == 2
    assert "holds no row with {'ability': 'art'}" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_parquet_and_a_reward_file_train_unchanged_and_resume_from_anywhere(project: Path, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "r")
    words = ["--config", str(project / "config.yaml"), "--launch.runs-dir", str(run.path.parent), "--launch.name", "r"]

    def launch(*words: str, cwd: Path) -> str:
        command = [sys.executable, "-m", "asyncrl", "launch", *words]
        try:
            done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=280, check=False)
        finally:
            if (run.path / "run.json").is_file():
                kill_all(of_run(run.id))
        logs = "".join(log.read_text()[-3000:] for log in run.logs.glob("*.log"))
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + logs
        return done.stdout

    (tmp_path / "elsewhere").mkdir()
    launch(*words, "--learner.steps", "4", cwd=tmp_path)
    assert json.loads(run.summary.read_text())["outcome"] == "finished"
    launch("--resume", str(run.path), "--learner.steps", "6", cwd=tmp_path / "elsewhere")
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert max(line.get("step") or 0 for line in lines) == 6
    assert "this row is broken" in run.log("actor-0").read_text()
    audit = subprocess.run(
        [sys.executable, "-m", "asyncrl", "audit", str(run.path), "--format", "json"],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert "env_error" in audit.stdout
