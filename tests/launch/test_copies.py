"""A copy of a run's folder: what its run.json names is the original's, which is left alone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import asyncrl
from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.launch.api import launch, prepare
from asyncrl.launch.diagnosis.status import status
from asyncrl.launch.origins import Origin
from asyncrl.launch.preflight import living, refuse_live
from asyncrl.launch.processes import this_process
from asyncrl.launch.supervision.supervision import Outcome
from asyncrl.run_folder import RunFolder


@pytest.fixture
def live(tmp_path: Path) -> RunFolder:
    """A run of which this process is the launcher."""
    config = Config.model_validate({"launch": {"runs_dir": str(tmp_path), "name": "run"}, "eval": {"tasks": 0}})
    run = RunFolder.create(tmp_path / "run", config)
    run.note(processes={"launcher": this_process()})
    return run


def resumed(run: RunFolder) -> Outcome:
    origin = Origin(resume=run.path)
    return launch(prepare(origin.load(None, {}).config, origin, checks="names"))


def copy_of(run: RunFolder) -> RunFolder:
    return RunFolder(Path(shutil.copytree(run.path, run.path.with_name("copy"), symlinks=True)))


def test_a_copy_of_a_live_run_is_refused_without_harm_to_the_original(live: RunFolder) -> None:
    copy = copy_of(live)
    assert copy.copied_from == live.path
    with pytest.raises(RunError, match=rf"is a copy of {live.path}, made while .* --fork {live.path}") as refused:
        resumed(copy)
    assert "kill" not in str(refused.value)
    assert "Stop it" not in str(refused.value)
    assert live.sockets.is_dir()
    assert live.shm.is_dir()
    live.remove_temporary()


def test_commands_on_a_copy_do_not_reach_the_original(live: RunFolder) -> None:
    copy = copy_of(live)
    assert living(copy) == {}
    assert status(copy)["processes"] == {}
    handle = asyncrl.open_run(copy.path)
    assert not handle.alive
    handle.stop()  # would be a SIGTERM to this process
    assert living(live) == {os.getpid(): "launcher"}
    live.remove_temporary()


def test_a_copy_of_a_run_that_has_ended_is_a_run_of_its_own(live: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.launch.loop.Launcher.supervise", lambda _: Outcome("finished", 0))
    live.note(processes={})
    copy = copy_of(live)
    assert resumed(copy).kind == "finished"
    assert copy.copied_from is None
    assert copy.id != live.id
    assert live.sockets.is_dir(), "left by a launch that was killed, and removed by the original's next one"
    copy.remove_temporary()
    live.remove_temporary()


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_copy_of_a_run_over_several_hosts_has_keys_and_weights_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_memory: bool
) -> None:
    """`private`, and without shared memory the weights too, lie in the run's folder and are copied with it."""
    if not shared_memory:
        monkeypatch.setattr("asyncrl.run_folder.os.access", lambda *_: False)
    config = Config.model_validate({"launch": {"host": "127.0.0.1"}, "eval": {"tasks": 0}})
    run = RunFolder.create(tmp_path / "run", config)
    (run.private / "buffer").write_text("tcp://127.0.0.1:1")
    (run.shm / "latest").write_text("of the original")
    keys = (run.private / "keys").read_text()
    copy = copy_of(run)
    copy.open()
    assert [path.name for path in copy.private.iterdir()] == ["keys"]
    assert (copy.private / "keys").read_text() != keys
    assert copy.private.stat().st_mode & 0o777 == 0o700
    assert not (copy.shm / "latest").exists()
    assert (run.private / "keys").read_text() == keys, "the original's stay"
    assert (run.shm / "latest").is_file()
    copy.remove_temporary()
    run.remove_temporary()


def test_a_live_run_that_was_moved_is_no_copy(live: RunFolder) -> None:
    moved = RunFolder(live.path.rename(live.path.with_name("moved")))
    assert moved.copied_from is None
    with pytest.raises(RunError, match=r"in use by a live run: launcher \(pid \d+\)\. Stop it first"):
        refuse_live(moved)
    moved.remove_temporary()
