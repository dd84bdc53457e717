"""The end of a run: its report takes a bounded time, a signal shortens it, and the exit code is the run's outcome."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.config import Config
from asyncrl.launch.diagnosis import waits
from asyncrl.run_folder import RunFolder
from tests.waiting import until

ROOT = Path(__file__).parents[2]
LAUNCHER = """
import atexit, sys, time
from pathlib import Path
atexit.register(lambda: (Path(sys.argv[1], "exiting").touch(), time.sleep(float(sys.argv[3]))))  # runs last
from asyncrl.launch import api, loop
from asyncrl.launch.origins import Origin
from asyncrl.launch.supervision.supervision import Outcome
from asyncrl.tracking.report import report

loop.Launcher.supervise = lambda _: Outcome("finished", 0)
report.draw = lambda *_: time.sleep(float(sys.argv[2]))
origin = Origin(resume=Path(sys.argv[1]))
sys.exit(api.launch(api.prepare(origin.load(None, {}).config, origin, checks="names")).exit_code)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    config = Config.model_validate({"launch": {"runs_dir": str(tmp_path), "name": "run"}, "eval": {"tasks": 0}})
    return RunFolder.create(tmp_path / "run", config)


def ending(run: RunFolder, plot_s: float, exit_s: float) -> subprocess.Popen[bytes]:
    """A launcher whose run has finished. Every plot takes `plot_s`, and the interpreter's end `exit_s`."""
    words = [sys.executable, "-c", LAUNCHER, str(run.path), str(plot_s), str(exit_s)]
    return subprocess.Popen(words, cwd=ROOT)


@pytest.mark.timeout(120)
def test_a_signal_while_the_plots_are_drawn_leaves_out_the_rest(run: RunFolder) -> None:
    launcher = ending(run, 2.0, 0.0)
    assert until(run.summary.is_file, 60)
    assert until(lambda: len(waits.why(run)) == 2)
    assert waits.why(run) == [
        "the run is over: finished",
        "its launcher still draws the report's plots: Ctrl-C or SIGTERM leaves out the rest",
    ]
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(15) == 0, "its outcome, and not the signal"
    assert "curves were left out" in run.report.read_text() or "No training step" in run.report.read_text()
    assert waits.why(run) == ["the run is over: finished"]
    run.open()
    assert "its launcher was killed" in waits.why(run)[0], "the summary is of an earlier launch"
    run.remove_temporary()


@pytest.mark.timeout(120)
def test_a_signal_while_the_interpreter_ends_does_not_change_the_exit_code(run: RunFolder) -> None:
    launcher = ending(run, 0.0, 3.0)
    assert until((run.path / "exiting").is_file, 60)
    for number in (signal.SIGTERM, signal.SIGINT):
        launcher.send_signal(number)
    assert launcher.wait(15) == 0
    run.remove_temporary()
