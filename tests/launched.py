"""A run that a test launches with its real processes, in a process of its own, to kill some of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.launch.processes import kill_all, of_run
from asyncrl.run_folder import RunFolder

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Launched:
    launcher: subprocess.Popen[bytes]
    run: RunFolder
    out: Path
    """What the launcher says."""

    @property
    def said(self) -> str:
        """The end of it, for the message of an assertion."""
        return self.out.read_text()[-3000:]

    @property
    def steps(self) -> int:
        """Training steps that the run has recorded."""
        return len(self.run.metrics.read_text().splitlines()) if self.run.metrics.is_file() else 0

    def kill(self, role: str) -> None:
        os.kill(pid(self.run, role), signal.SIGKILL)


@contextmanager
def launched(folder: Path, sections: Mapping[str, Mapping[str, Any]]) -> Iterator[Launched]:
    """The run `folder`/run with this configuration. In the end none of its processes is left."""
    launch = {**sections.get("launch", {}), "runs_dir": str(folder), "name": "run"}
    (folder / "config.json").write_text(json.dumps({**sections, "launch": launch}))
    command = [sys.executable, "-m", "asyncrl", "launch", "--config", str(folder / "config.json")]
    run = RunFolder(folder / "run")
    with (folder / "out").open("w") as out:
        launcher = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT)
    try:
        yield Launched(launcher, run, folder / "out")
    finally:
        end(launcher, run)


def end(launcher: subprocess.Popen[bytes], run: RunFolder) -> None:
    """Kills the launcher and what is left of the run."""
    launcher.kill()
    launcher.wait(10)
    if (run.path / "run.json").is_file():
        kill_all(of_run(run.id))
        run.remove_temporary()


def pid(run: RunFolder, role: str) -> int:
    """0: it has not started."""
    path = run.path / "run.json"
    if not path.is_file() or not path.read_text():
        return 0
    return int(run.record()["processes"].get(role, [0])[0])
