"""`asyncrl.train` and the handle of a run, with the real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import asyncrl
import asyncrl.launch.loop  # `asyncrl.launch` is a package, which must not hide `asyncrl.train`
from asyncrl.errors import ConfigError, RunError
from asyncrl.launch.preflight import living
from asyncrl.launch.processes import kill_all, of_run
from asyncrl.run_folder import RunFolder
from tests.waiting import until

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
SMALL = {
    "learner.groups_per_step": 2, "learner.group_size": 2, "learner.steps": 2, "buffer.capacity": 32,
    "actors.count": 1, "actors.slots": 4, "actors.drain_s": 0.0, "eval.tasks": 0, "launch.name": "run",
}  # fmt: skip
CALLER = """
    import sys, time
    import asyncrl
    from pathlib import Path
    from tests.launch.test_run import configured

    if __name__ == "__main__":
        run = asyncrl.train(configured(Path(sys.argv[1])), wait=False, detach=sys.argv[2] == "detach")
        print(run.path, flush=True)
        time.sleep(300 if sys.argv[2] == "stay" else 0)
"""

pytestmark = pytest.mark.system


def configured(folder: Path, **fields: object) -> asyncrl.Config:
    values = SMALL | {name.replace("__", "."): value for name, value in fields.items()}
    return asyncrl.Config.load(QUICKSTART, {**values, "launch.runs_dir": str(folder)})


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    if (tmp_path / "run" / "run.json").is_file():
        run = RunFolder(tmp_path / "run")
        kill_all(of_run(run.id))
        run.remove_temporary()


def call(folder: Path, how: str) -> tuple[subprocess.Popen[str], asyncrl.Run]:
    """A process that calls `train` without waiting, and the run that it started."""
    script = folder / "caller.py"
    script.write_text(textwrap.dedent(CALLER))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    caller = subprocess.Popen(
        [sys.executable, str(script), str(folder), how], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert caller.stdout is not None
    return caller, asyncrl.open_run(caller.stdout.readline().strip())


@pytest.mark.timeout(200)
def test_a_run_to_its_end(folder: Path) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    threads = threading.active_count()
    run = asyncrl.train(configured(folder))
    assert not run.alive
    assert (run.summary["outcome"], run.summary["steps"]) == ("finished", 2)
    assert run.wait(0.0) == run.summary
    metrics = run.metrics()
    assert metrics["step"].max() == 2
    assert {column.shape for column in metrics.values()} == {metrics["step"].shape}
    assert np.isfinite(metrics["reward/mean"]).any()
    assert run.status()["summary"]["steps"] == 2
    again = asyncrl.open_run(run.path)
    again.stop()
    assert again.summary == run.summary
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert threading.active_count() == threads
    with pytest.raises(RunError, match="already holds a run"):
        asyncrl.train(configured(folder))


@pytest.mark.timeout(120)
def test_a_run_is_stopped_by_its_handle(folder: Path) -> None:
    run = asyncrl.train(configured(folder, learner__steps=500), wait=False)
    assert run.alive
    assert "launcher" in run.status()["processes"].values()
    with pytest.raises(RunError, match="is live"):
        _ = run.summary
    with pytest.raises(TimeoutError):
        run.wait(0.1)
    run.stop(60.0)
    assert run.summary["outcome"] == "interrupted"
    assert living(RunFolder(run.path)) == {}
    assert "run folder" in (run.path / "logs" / "launcher.log").read_text()


@pytest.mark.timeout(120)
def test_nothing_outlives_a_caller_killed_dead(folder: Path) -> None:
    caller, run = call(folder, "stay")
    assert until(lambda: "learner" in living(RunFolder(run.path)).values())
    caller.kill()
    caller.wait(10)
    assert until(lambda: living(RunFolder(run.path)) == {}, 60.0)
    assert run.summary["outcome"] == "interrupted", "it was stopped in order"


@pytest.mark.timeout(120)
def test_a_detached_run_survives_its_caller(folder: Path) -> None:
    caller, run = call(folder, "detach")
    assert caller.wait(60) == 0
    until(lambda: False, 1.0)
    assert run.alive
    run.stop(60.0)
    assert run.summary["outcome"] == "interrupted"


def test_errors_are_raised_where_train_is_called(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"env\.name: 'no_such_module:Env'"):
        asyncrl.train(configured(folder, env__name="no_such_module:Env"), wait=False)
    assert list(folder.iterdir()) == []
    with pytest.raises(RunError, match="holds no run"):
        asyncrl.open_run(folder)


@pytest.mark.timeout(120)
def test_a_config_error_of_a_role_is_raised_too(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"learner\.loss"):
        asyncrl.train(configured(folder, learner__loss="no_such_module:loss"))
