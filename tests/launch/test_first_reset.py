"""The trial reset's process ends with the launcher that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.launch.fakes import running
from tests.waiting import until

ENVIRONMENT = """
import os, time
class Hangs:
    def __init__(self):
        with open({file!r}, "w") as file:
            file.write(str(os.getpid()) + "\\n")
        time.sleep(300)
    async def reset(self, task): ...
    async def step(self, message): ...
"""
LAUNCHER = """
from asyncrl.config import Config
from asyncrl.launch.checks.first_reset import check_reset
check_reset(Config.model_validate({"env": {"name": "hangs:Hangs"}}), [{"id": "0"}])
"""


def test_it_ends_with_a_launcher_killed_dead_while_a_constructor_hangs(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    (tmp_path / "hangs.py").write_text(ENVIRONMENT.format(file=str(file)))
    path = os.pathsep.join((str(tmp_path), *filter(None, sys.path)))
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], env={**os.environ, "PYTHONPATH": path})
    try:
        assert until(lambda: file.exists() and file.read_text().endswith("\n"))
        trial = int(file.read_text())
        assert running(trial)
    finally:
        launcher.kill()
        launcher.wait()
    try:
        assert until(lambda: not running(trial))
    finally:
        if running(trial):
            os.kill(trial, signal.SIGKILL)
