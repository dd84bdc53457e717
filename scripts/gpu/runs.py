"""Whole runs of `configs/one-gpu.yaml` with a random model, and what they recorded."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from scripts.gpu.report import ROOT, Report, end_of

TASK = Path(__file__).with_name("task.py")
Changes = dict[str, dict[str, Any]]
Records = list[dict[str, Any]]
TINY: Changes = {
    "model": {"dtype": "float32"},
    "actors": {"engine": "hf", "engine_options": {}, "threads": 1, "slots": 16},
    "weights": {"channel": "shm"},
    "learner": {"gpu_memory": 1.0, "tokens_per_micro_batch": 1024, "activation_checkpointing": False, "threads": 1},
    "launch": {"start_s": 120.0},
}
"""For a CPU: the engine and the channel that need no GPU."""


def configuration(work: Path, name: str, tiny: bool, changes: Changes) -> Path:
    """The shipped configuration with another model and task, and `changes`, in a file."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "one-gpu.yaml").read_text())
    common: Changes = {
        "model": {"path": str(work / "model")},
        "env": {"name": f"{TASK}:Evenness", "options": {}, "max_turns": 1},
        "weights": {"drain": not tiny and not names_versions()},
        "buffer": {"filters": []},
        "learner": {"warmup_steps": 0, "checkpoint_every": 10_000},
        "eval": {"tasks": 0},
        "launch": {"runs_dir": str(work / "runs"), "name": name, "start_s": 200.0},
    }
    for part in (common, TINY if tiny else {}, changes):
        for section, values in part.items():
            config[section] = config.get(section, {}) | values
    config["data"] = {"source": f"{TASK}:Questions"}
    if not tiny:
        from scripts.gpu.engine import GRAPHS

        options = config["actors"].get("engine_options", {})
        config["actors"]["engine_options"] = options | {"args": GRAPHS}
    path = work / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def names_versions() -> bool:
    """Whether vLLM, if it is installed, says which version sampled a token: from 0.32 on."""
    if importlib.util.find_spec("vllm") is None:
        return True
    major, minor, *_ = importlib.metadata.version("vllm").split(".")
    return (int(major), int(minor)) >= (0, 32)


def launched(report: Report, work: Path, name: str, config: Path, *, limit_s: float | None = None) -> int | None:
    """The exit code; None: it was ended at its limit. Raises RuntimeError with the end of its logs if it failed."""
    words = [sys.executable, "-m", "asyncrl", "launch", "--config", str(config)]
    code = report.child(words, work / f"{name}.log", limit_s=limit_s)
    if code:
        logs = sorted((work / "runs" / name / "logs").glob("*.log"))
        said = "".join(f"\n== {log.name}\n{end_of(log)}" for log in [work / f"{name}.log", *logs])
        raise RuntimeError(f"{' '.join(words)} ended with {code}{said[-12_000:]}")
    return code


def records(work: Path, name: str) -> Records:
    """One for each training step."""
    path = work / "runs" / name / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def series(of: Records, name: str) -> list[float]:
    return [float(record[name]) for record in of if record.get(name) is not None]
