"""Runs a configuration for a short while, so that there is a record to plan from."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.launch.bound import BoundLaunch
from asyncrl.plan.setting import config_with
from asyncrl.run_folder import RunFolder

POLL_S = 0.2
STOP_S = 120.0
"""Seconds that the run has to end by itself, checkpoint and report included."""
UNEVALUATED: Mapping[str, Any] = {
    "eval.tasks": 0, "eval.sets": {}, "eval.every": 0, "eval.stop_at": {}, "eval.patience": {}, "eval.keep_best": "",
    "eval.final": "", "actors.eval": 0,
}  # fmt: skip
"""Fields of a run that plays no evaluation. Reserved actors train."""


def probe(config: Config, seconds: float) -> RunFolder:
    """A run of `config` that is stopped after `seconds`, counted from its first training step. It evaluates nothing,
    and keeps all payloads. Raises RunError if it does not begin, or ends by itself with an error."""
    name = f"probe-{time.strftime('%Y%m%d-%H%M%S')}"
    run = RunFolder((Path(config.launch.runs_dir) / name).absolute())
    with tempfile.TemporaryDirectory(prefix="asyncrl-plan-") as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(yaml.safe_dump(probed_config(config, name).model_dump(mode="json"), sort_keys=False))
        with (Path(folder) / "launch.log").open("w+") as log:
            launcher = BoundLaunch("--config", str(file), output=log, errors=subprocess.STDOUT)
            try:
                _wait(launcher, lambda: bool(_steps(run)), config.launch.start_s + STOP_S, "no first training step")
                deadline = time.monotonic() + seconds
                while launcher.poll() is None and time.monotonic() < deadline:
                    time.sleep(POLL_S)
            except RunError as error:
                log.seek(0)
                last = (log.read().strip().splitlines() or ["it printed nothing"])[-1]
                raise RunError(f"the probe of {seconds:g} s failed: {error} ({last})") from error
            finally:
                _stop(launcher)
    return RunFolder.existing(run.path)


def probed_config(config: Config, name: str) -> Config:
    """The configuration of the probe. Raises ConfigError."""
    return config_with(config, {"launch.name": name, "buffer.keep": "all", **UNEVALUATED})


def _steps(run: RunFolder) -> int:
    return len(run.metrics.read_text().splitlines()) if run.metrics.is_file() else 0


def _wait(launcher: subprocess.Popen[bytes], done: Callable[[], bool], limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not done():
        if launcher.poll() is not None:
            raise RunError(f"{what}: the launcher ended with exit code {launcher.returncode}")
        if time.monotonic() > deadline:
            raise RunError(f"{what} within {limit_s:g} s")
        time.sleep(POLL_S)


def _stop(launcher: subprocess.Popen[bytes]) -> None:
    """Ends the run in order, and in any case."""
    if launcher.poll() is None:
        launcher.terminate()
        try:
            launcher.wait(STOP_S)
        except subprocess.TimeoutExpired:
            launcher.kill()  # its guardian ends the rest
            launcher.wait(STOP_S)
