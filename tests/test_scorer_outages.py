"""The scorer and the teacher's server, killed and halted at random while a run learns from them: no score is lost or
counted twice in 60 faults, the run goes on whenever they are back, the audit holds and the replay is exact."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from asyncrl.run_folder import RunFolder
from tests.test_served_teacher_run import ROOT, SMALL, said, server, until

__all__ = ["server"]

FAULTS = 60
KINDS = ("scorer killed", "scorer halted", "server killed", "server halted")
FLAGS = SMALL | {
    "learner.steps": 100_000, "learner.checkpoint_every": 20, "launch.restarts": 1000, "buffer.lease_s": 5,
    "learner.teacher.server_s": 10,
}  # fmt: skip
HALTED_S, ABSENT_S, BETWEEN_S = (0.5, 8.0), (0.0, 4.0), (0.2, 3.0)

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.timeout(3000)]


def test_sixty_faults_of_scorer_and_server(run: RunFolder, server: Callable[[], subprocess.Popen[bytes]]) -> None:
    draw = random.Random(0)
    serving = server()
    flags = [word for name, value in FLAGS.items() for word in (f"--{name}", str(value))]
    flags += ["--learner.teacher.servers", f"http://127.0.0.1:{serving.args[3]}"]  # type: ignore[index]
    log = (run.path.parent / "launcher.log").open("w+")
    launcher = subprocess.Popen(
        [sys.executable, "-m", "asyncrl", "launch", "--config", "configs/distil-server.yaml", *flags,
         "--launch.runs-dir", str(run.path.parent), "--launch.name", run.name],
        stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip

    def steps() -> int:
        return run.metrics.read_text().count('"teacher/lower_bound"') if run.metrics.is_file() else 0

    def scorer() -> int:
        return int(run.record()["processes"]["scorer-0"][0])

    def goes_on(since: int) -> None:
        until(lambda: steps() > since or launcher.poll() is not None, f"a step after step {since}")
        assert launcher.poll() is None, Path(log.name).read_text()

    try:
        goes_on(0)
        for number in range(FAULTS):
            before, kind = steps(), draw.choice(KINDS)
            match kind:
                case "scorer killed":
                    os.kill(scorer(), signal.SIGKILL)
                case "server killed":
                    serving.kill()
                    serving.wait()
                    time.sleep(draw.uniform(*ABSENT_S))
                    serving = server()
                case _:
                    pid = scorer() if kind == "scorer halted" else serving.pid
                    os.kill(pid, signal.SIGSTOP)
                    time.sleep(draw.uniform(*HALTED_S))
                    os.kill(pid, signal.SIGCONT)
            time.sleep(draw.uniform(*BETWEEN_S))
            if number % 10 == 9:  # several faults may meet, and then the run must go on
                goes_on(before)
        goes_on(steps())
        launcher.send_signal(signal.SIGINT)
        launcher.wait(240)
    finally:
        if launcher.poll() is None:
            launcher.kill()
            launcher.wait()
        log.close()
    code, text = said("audit", str(run.path))
    assert code == 0, text
    code, text = said("replay", str(run.path))
    assert code == 0, text
    assert "every one bit-identical" in text
    with closing(sqlite3.connect(f"{(run.buffer / 'ledger.sqlite').as_uri()}?mode=ro", uri=True)) as db:
        unscored = "SELECT count(*) FROM groups g WHERE state = 'trained' AND number NOT IN (SELECT grp FROM scores)"
        assert db.execute(unscored).fetchone() == (0,)
        uses, groups = db.execute("SELECT count(*), count(DISTINCT grp) FROM score_uses").fetchone()
        assert uses == groups > 0
        twice = "SELECT grp FROM scorings WHERE ended = 'scored' GROUP BY grp HAVING count(*) > 1"
        assert not db.execute(twice).fetchall()
