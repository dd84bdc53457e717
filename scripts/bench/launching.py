"""Runs of `asyncrl launch` that a benchmark measures: to their end, or for as long as it needs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
Records = Sequence[Mapping[str, float]]
"""One per training step, as in metrics.jsonl."""


def launched(run: Path, flags: Mapping[str, Any], enough: Callable[[Records], bool] | None = None) -> Records:
    """The quickstart with other fields, run in the folder `run`, which is made anew; gives its records. With `enough`
    it is stopped once that says yes. Raises SystemExit if it fails or takes half an hour."""
    shutil.rmtree(run, ignore_errors=True)
    run.parent.mkdir(parents=True, exist_ok=True)
    words = [word for path, value in flags.items() for word in (f"--{path}", str(value))]
    own = ["--launch.name", run.name, "--launch.runs_dir", str(run.parent)]
    command = [sys.executable, "-m", "asyncrl", "launch", "--config", str(ROOT / "configs" / "quickstart.yaml")]
    log = run.with_name(f"{run.name}.log")
    deadline = time.monotonic() + 1800
    with log.open("w") as file:
        process = subprocess.Popen([*command, *words, *own], stdout=file, stderr=file, cwd=run.parent)
        try:
            while process.poll() is None and not (enough and enough(records(run))):
                if time.monotonic() > deadline:
                    raise SystemExit(f"{run.name} did not end within half an hour: see {log}")
                time.sleep(0.2)
            if (code := process.poll()) is not None and (code or enough):
                raise SystemExit(f"{run.name} ended by itself, with exit code {code}: see {log}")
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)
    return records(run)


def records(run: Path) -> Records:
    """Those that are complete."""
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True) if metrics.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def rate(first: Mapping[str, float], last: Mapping[str, float]) -> float:
    """Trained policy tokens per second between the ends of two steps."""
    return (last["tokens"] - first["tokens"]) / (last["wall_s"] - first["wall_s"])
