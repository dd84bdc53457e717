"""Whose stacks are written, by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from asyncrl.config import Config
from asyncrl.launch.diagnosis.stacks import write_stacks
from asyncrl.launch.processes import RUN_MARKER
from asyncrl.run_folder import RunFolder


@pytest.mark.skipif(sys.platform != "linux", reason="roles are forked on Linux alone")
def test_a_role_without_a_marker_has_the_name_of_run_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)  # no py-spy
    run = RunFolder.create(tmp_path / "r", Config())
    other = {**os.environ, RUN_MARKER: run.id}
    known, unknown = (subprocess.Popen(["sleep", "60"], env=other, start_new_session=True) for _ in range(2))
    try:
        run.note(processes={"actor-7": [known.pid, psutil.Process(known.pid).create_time()]})
        write_stacks(run, ["stalled"])
    finally:
        for process in (known, unknown):
            process.kill()
            process.wait()
    said = (run.logs / "stall.log").read_text().splitlines()
    handles = "handles no signal for its stacks"
    assert sorted(said[2:]) == [f"actor-7 (pid {known.pid}): {handles}", f"sleep (pid {unknown.pid}): {handles}"]
