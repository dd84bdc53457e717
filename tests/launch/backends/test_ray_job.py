"""`ray job submit` and `ray job stop`, on a cluster of one node with its dashboard."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from asyncrl.audit.command import audit
from asyncrl.launch.preflight import living
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.sinks.jsonl import by_step
from tests.launch.two_hosts import ENVIRONMENT
from tests.waiting import until

ROOT = Path(__file__).parents[3]
RAY = str(Path(sys.executable).with_name("ray"))
SMALL = {
    "learner.groups_per_step": 4, "learner.group_size": 4, "learner.steps": 2000, "learner.checkpoint_every": 10,
    "buffer.capacity": 64, "actors.count": 1, "actors.slots": 8, "actors.drain_s": 2, "eval.tasks": 0,
    "launch.name": "run",
    "launch.backend": "ray", "launch.host": "127.0.0.1", "weights.channel": "zmq",
}  # fmt: skip


@pytest.fixture
def jobs() -> Iterator[str]:
    """The address to which jobs are submitted."""
    ports = [free_port() for _ in range(3)]
    folder = tempfile.mkdtemp(prefix="job-", dir="/tmp")
    node = subprocess.Popen(
        [
            RAY, "start", "--head", f"--port={ports[0]}", f"--dashboard-port={ports[1]}", "--node-ip-address=127.0.0.1",
            f"--dashboard-agent-listen-port={ports[2]}", f"--temp-dir={folder}", "--num-cpus=8", "--block",
            "--object-store-memory=80000000",
        ],
        env=ENVIRONMENT, start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    yield f"http://127.0.0.1:{ports[1]}"
    mine = psutil.Process(node.pid).children(recursive=True) if node.poll() is None else []
    node.send_signal(signal.SIGTERM)
    try:
        node.wait(60)
    except subprocess.TimeoutExpired:
        node.kill()
        node.wait(10)
    _, left = psutil.wait_procs(mine, timeout=10)
    for process in left:
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_submitted_run_trains_and_stops_in_order(jobs: str, tmp_path: Path) -> None:
    assert until(lambda: ray(jobs, "list").returncode == 0, 120.0), ray(jobs, "list").stderr
    values = SMALL | {"launch.runs_dir": tmp_path}
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "asyncrl", "launch", "--config", str(ROOT / "configs" / "quickstart.yaml"), *words]
    patient = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}})
    how = ["--no-wait", "--submission-id", "a-run", "--runtime-env-json", patient]
    submitted = ray(jobs, "submit", *how, "--", *command)
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    run = RunFolder(tmp_path / "run")
    try:
        trains = until(lambda: run.metrics.is_file() and len(by_step(run.metrics)) >= 3, 200.0)
        assert trains, ray(jobs, "logs", "a-run").stdout
    finally:
        stopped = ray(jobs, "stop", "a-run")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert until(lambda: run.summary.is_file() and living(run) == {}, 60.0)
    assert json.loads(run.summary.read_text())["outcome"] == "interrupted"
    assert list(run.checkpoints.glob("step-*")), "it stopped in order"
    assert audit(run, step=None, format="json", out=run.path / "audit.json") == 0


def ray(address: str, word: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [RAY, "job", word, "--address", address, *words], env={**ENVIRONMENT, "RAY_ADDRESS": address},
        capture_output=True, text=True, timeout=150, cwd=os.sep,
    )  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
