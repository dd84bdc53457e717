"""Rows whose subject is time: a real `asyncrl launch`, and TRL's trainer on the same tasks.

The clock starts with the first step (of TRL with its first batch) and ends with the step at which the success of new
episodes passes the threshold: no start of a process, no import and no evaluation counts, for any of them. The first
batch's generation is left out too, and of the asynchronous run what it had generated ahead by then, which is at most
`buffer.max_staleness` batches.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from asyncrl.config import Config

TRL = Path(__file__).with_name("trl_learns.py")
LIMIT_S = 3600
"""Of one run"""


def launched(config: Config, lag: int) -> dict[str, Any]:
    """One asynchronous run, or a synchronous one with `buffer.max_staleness` 0. `lag` has no effect: it comes out."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
        command = [sys.executable, "-m", "asyncrl", "launch", "--config", str(path), "--launch.name", "run"]
        _run(command, folder)
        lines = (Path(folder) / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    curve = [
        {"success": r["reward/success"], "tokens": r["tokens"], "s": r["wall_s"]}
        for r in records
        if "reward/success" in r
    ]
    return result(curve)


def with_trl(config: Config, lag: int) -> dict[str, Any]:
    """The same task, start model, batch, learning rate and optimizer in TRL's GRPOTrainer; single-turn tasks only.

    TRL's other settings are its defaults, KL off as in both.
    """
    learner = config.learner
    wanted = {
        "model": config.model.path,
        "source": config.data.source,
        "environment": config.env.name,
        "data_seed": config.data.seed,
        "seed": learner.seed,
        "steps": learner.steps,
        "groups": learner.groups_per_step,
        "group_size": learner.group_size,
        "new_tokens": config.actors.max_new_tokens,
        "lr": learner.lr,
        "warmup_steps": learner.warmup_steps,
        "betas": list(learner.betas),
        "max_grad_norm": learner.max_grad_norm,
        "threads": learner.threads,
    }
    python = os.environ.get("TRL_PYTHON", sys.executable)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "curve.json"
        _run([python, str(TRL), json.dumps(wanted), str(out)], folder)
        found = json.loads(out.read_text())
    return result(found["curve"]) | {"trl": found["trl"]}


def result(curve: Sequence[dict[str, float]]) -> dict[str, Any]:
    """A row from a curve whose points have the success of new episodes, all tokens so far, and seconds.

    Raises ValueError for an empty curve.
    """
    if not curve:
        raise ValueError("the run wrote no training step")
    began = curve[0]["s"]
    points = [point | {"s": round(point["s"] - began, 3)} for point in curve]
    return {
        "steps": len(points),
        "tokens": points[-1]["tokens"],
        "wall_s": points[-1]["s"],
        "curve": points,
    }


def _run(command: Sequence[str], folder: str) -> None:
    """Raises RuntimeError with the end of what the command said if it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"{command[:4]} ended with code {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
