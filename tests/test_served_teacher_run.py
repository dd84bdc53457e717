"""`configs/distil-server.yaml` with the real processes and a fake teacher server: the scorer is killed, the server too,
and no score is lost or counted twice."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from asyncrl.actors.engines.servers.process import free_port
from asyncrl.buffer.client import BufferClient
from asyncrl.model import QUICKSTART
from asyncrl.run_folder import RunFolder

ROOT = Path(__file__).parents[1]
DEADLINE_S = 240.0
STEPS = 3
SMALL = {
    "learner.groups_per_step": 4, "learner.group_size": 2, "learner.steps": STEPS, "learner.checkpoint_every": 2,
    "learner.warmup_steps": 0, "buffer.capacity": 32, "buffer.keep": "all", "buffer.lease_s": 10, "actors.count": 1,
    "actors.slots": 8, "eval.tasks": 0, "learner.teacher.path": "quickstart", "learner.teacher.k": 4,
    "learner.teacher.score_slots": 2, "learner.teacher.server_s": 20, "tracking.system_s": 1,
}  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.timeout(600)]


def until(done: Callable[[], object], what: str, launcher: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < deadline, what
        if launcher is not None and launcher.poll() is not None:
            pytest.fail(f"{what}: the run has ended\n{launcher.communicate()[0]}")
        time.sleep(0.05)


def said(*words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl", *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, timeout=DEADLINE_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.fixture
def server() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts the fake server, always on the same port; gives the port as its argument 4."""
    port, started = free_port(), []
    words = json.loads((QUICKSTART / "config.json").read_text())["vocab_size"]

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.scorer.fake_teacher", str(port), str(words)]
        started.append(subprocess.Popen(command, cwd=ROOT))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_killed_scorer_and_a_restarted_server(
    run: RunFolder, server: Callable[[], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    first = server()
    port = first.args[3]  # type: ignore[index]
    flags = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    flags += ["--learner.teacher.servers", f"http://127.0.0.1:{port}"]
    launcher = subprocess.Popen(
        [sys.executable, "-m", "asyncrl", "launch", "--config", "configs/distil-server.yaml", *flags,
         "--launch.runs-dir", str(run.path.parent), "--launch.name", run.name],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        until(lambda: run.metrics.is_file() and '"teacher/lower_bound"' in run.metrics.read_text(), "a step", launcher)
        first.kill()
        first.wait()
        with closing(BufferClient(run.address("buffer"), identity="test", deadline_s=20.0)) as buffer:

            def silent() -> bool:
                status = buffer.status()
                return bool(status["unscored"] and status["teacher_silent"])

            until(silent, "unscored groups, and a silent teacher", launcher)
            pid = run.record()["processes"]["scorer-0"][0]
            os.kill(pid, signal.SIGKILL)
            until(lambda: run.record()["processes"]["scorer-0"][0] != pid, "another scorer", launcher)
            waiting = said("why", str(run.path))[1]
            assert "not scored yet" in waiting or "scorer-0" in waiting, waiting
        server()
        text = launcher.communicate(timeout=DEADLINE_S)[0]
    finally:
        if launcher.poll() is None:
            launcher.kill()
            launcher.wait()
    assert launcher.returncode == 0, text
    code, text = said("audit", str(run.path))
    assert code == 0, text
    code, text = said("replay", str(run.path))
    assert code == 0, text
    assert f"replay: {STEPS} steps" in text
    assert "every one bit-identical" in text
    check(run.buffer / "ledger.sqlite")
    report = (run.path / "teacher.json").read_text()
    assert len(json.loads(report)["digest"]) == 32


def check(ledger: Path) -> None:
    with closing(sqlite3.connect(f"{ledger.as_uri()}?mode=ro", uri=True)) as db:
        trained = db.execute("SELECT count(*) FROM groups WHERE state = 'trained'").fetchone()[0]
        used = db.execute("SELECT count(*), count(DISTINCT grp) FROM score_uses").fetchone()
        kept = db.execute("SELECT count(*) FROM scores s JOIN score_uses u ON u.grp = s.grp AND u.digest = s.digest")
        assert (trained, used, kept.fetchone()[0]) == (4 * STEPS, (4 * STEPS, 4 * STEPS), 4 * STEPS)
        twice = "SELECT grp FROM scorings WHERE ended = 'scored' GROUP BY grp HAVING count(*) > 1"
        assert not db.execute(twice).fetchall()
