"""Who is to blame when nothing goes on: from what the roles say, and with real processes of which one is stopped."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl import cli
from asyncrl.config import Config
from asyncrl.launch.diagnosis.why import RoleState, explain
from asyncrl.run_folder import RunFolder
from tests.launch.fakes import pids_of, running
from tests.waiting import until

ADMISSION = "buffer: admission: 4 groups in flight, 0 waiting"


def state(name: str, cause: str | None = None, on: str = "", process: str = "running") -> RoleState:
    return RoleState(name, 7, True, cause, on, 130.2, process)


def test_the_one_that_works_is_named() -> None:
    found = explain([state("buffer"), state("learner", "batch", "3 of 4 groups are complete"), state("actor-0")], None)
    assert found.blamed == ("actor-0",)
    assert "learner waits for batch (3 of 4 groups are complete) from actor-0 for 130 s" in found.lines


def test_a_ring_is_a_deadlock() -> None:
    roles = [state("buffer"), state("learner", "batch"), state("actor-0", "ticket", ADMISSION)]
    found = explain(roles, None)
    assert "deadlock: learner -> actor-0 -> learner: each waits for the next" in found.lines
    assert found.blamed == ("actor-0", "learner")
    # Another actor that works ends the learner's wait.
    found = explain([*roles, state("actor-1")], None)
    assert not any("deadlock" in line for line in found.lines)
    assert found.blamed == ("actor-1",)


def test_a_stopped_process_comes_before_every_chain() -> None:
    found = explain([state("buffer", process="stopped"), state("learner", "batch"), state("actor-0")], None)
    assert found.blamed == ("buffer",)
    assert "kill -CONT 7" in found.lines[0]


def test_a_player_is_not_behind_and_a_reserved_one_waits_for_the_learner() -> None:
    status = {"branch": 0, "published": 9, "held": {"actor-0": [0, 4], "actor-1": [0, 9]}, "players": ["actor-0"]}
    why = "buffer: no evaluation is open, and actor-0 plays nothing else (actors.eval)"
    found = explain([state("learner"), state("actor-0", "ticket", why), state("actor-1")], status)
    assert not any("are published" in line for line in found.lines)
    assert found.blamed == ("learner",)


def test_an_actor_with_old_weights_is_named() -> None:
    held = {"actor-0": [1, 4], "actor-1": [0, 9], "actor-2": [0, 2]}  # the last one has left
    status = {"branch": 1, "published": 4, "held": held}
    lines = explain(
        [state("learner"), state("actor-1", "ticket", "buffer: actor-1 holds weights (0, 9)")], status
    ).lines
    assert [line for line in lines if "are published" in line] == [
        "actor-1 holds weights (branch 0, version 9), and 4 of branch 1 are published"
    ]


@pytest.mark.system
@pytest.mark.parametrize("on_stall", ["warn", "restart", "abort"])
def test_a_stall_leaves_the_stacks_and_is_acted_on(run: RunFolder, config: Config, on_stall: str) -> None:
    limits = config.launch.model_copy(update={"stall_s": 6.0, "on_stall": on_stall})
    run.save_config(config.model_copy(update={"launch": limits}))
    launcher = str(Path(__file__).parents[1] / "fake_launcher.py")
    words = [sys.executable, launcher, str(run.path), "buffer=stay", "learner=done", "actor-0=stay"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert until(lambda: all(pids_of(run, name) for name in ("buffer", "learner", "actor-0")))
        stopped = pids_of(run, "actor-0")[0]
        os.kill(stopped, signal.SIGSTOP)
        if on_stall == "warn":
            assert until(lambda: "actor-0 is stopped" in "".join(map(str, asked(run))), 10.0)
        stall = run.logs / "stall.log"
        assert until(lambda: stall.is_file() and "actor-0 is stopped" in stall.read_text())
        assert until(lambda: "fake_role.py" in run.log("learner").read_text()), "no stack of a role in its log"
        if on_stall == "abort":
            out, _ = process.communicate(timeout=30)
            assert (process.returncode, "launch.stall_s" in out, "actor-0 is stopped" in out) == (1, True, True)
            return
        if on_stall == "restart":
            assert until(lambda: len(pids_of(run, "actor-0")) == 4), "not started again"
            assert not running(stopped)
        (run.path / "done").touch()
        out, _ = process.communicate(timeout=30)
        assert out.strip() == "finished 0"
    finally:
        process.kill()
        process.communicate(timeout=10)
    events = [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]
    assert {e["action"] for e in events if e["kind"] == "stall"} == {on_stall}


def asked(run: RunFolder) -> list[str]:
    """What `asyncrl why` prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.raises(SystemExit):
        cli.main(["why", str(run.path)])
    return said.getvalue().splitlines()


def test_a_learner_without_scores_waits_for_the_scorer_which_names_the_server() -> None:
    unscored = "1 of 4 groups are complete; 0 are in flight; 3 are not scored yet (http://gpu-7:8000: refused)"
    roles = [state("learner", "batch", unscored), state("scorer-0"), state("actor-0", "ticket", ADMISSION)]
    assert explain(roles, None).blamed == ("scorer-0",)
    roles[1] = state("scorer-0", "teacher", "http://gpu-7:8000: ConnectError")
    found = explain(roles, None)
    assert "scorer-0 waits for teacher (http://gpu-7:8000: ConnectError) for 130 s" in found.lines
    assert found.blamed == (), "no restart of a role would help"
    roles[1] = state("scorer-0", "groups", "buffer: every complete group is scored")
    assert explain([state("learner", "batch"), roles[1], state("actor-0")], None).blamed == ("actor-0",)
