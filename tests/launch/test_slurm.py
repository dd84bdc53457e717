"""The printed job script, given to a real Slurm of one node that this test starts, and run by it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.launch.processes import kill_all, of_run
from asyncrl.run_folder import RunFolder
from tests.waiting import until

ROOT = Path(__file__).parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue")
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=16 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
SMALL = {
    "learner.steps": 2, "learner.groups-per-step": 4, "learner.group-size": 4, "buffer.capacity": 64, "eval.tasks": 0,
    "launch.name": "run",
}  # fmt: skip


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment in which its commands reach it."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"a Slurm of its own needs root, and {' '.join(missing) or 'no more'} (Debian: slurm-wlm, munge)")
    folder = tmp_path / "slurm"
    (folder / "spool").mkdir(parents=True)
    (folder / "state").mkdir()
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o600)
    host, ports = socket.gethostname().partition(".")[0], [free_port(), free_port()]
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, host=host, ports=ports))
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH, "RAY_AUTH_MODE": "disabled"}
    environment["RAY_raylet_start_wait_time_s"] = "120"  # of a busy machine
    munge = ["--force", "--foreground", f"--socket={folder}/munge.sock", f"--key-file={folder}/key"]
    munge += [f"--log-file={folder}/munge.log", f"--pid-file={folder}/munge.pid", f"--seed-file={folder}/seed"]
    daemons = []
    try:
        for command in (["munged", *munge], ["slurmctld", "-D"], ["slurmd", "-D"]):
            daemons.append(
                subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL, start_new_session=True,
                )
            )  # fmt: skip
            if command[0] == "munged":
                assert until(lambda: (folder / "munge.sock").exists(), 20.0)
        assert until(lambda: "idle" in said(environment, "sinfo", "-h"), 60.0), (folder / "slurmctld.log").read_text()
        yield environment
    finally:
        said(environment, "scancel", "--user", "root")
        until(lambda: not said(environment, "squeue", "-h"), 60.0)
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(10)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_slurm_takes_the_script_and_runs_it(slurm: dict[str, str], tmp_path: Path) -> None:
    words = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    script = said(
        slurm, sys.executable, "-m", "asyncrl", "launch", "--config", str(ROOT / "configs" / "quickstart.yaml"),
        "--print", "slurm", *words,
    )  # fmt: skip
    (tmp_path / "job.sh").write_text(script)
    tried = subprocess.run(
        ["sbatch", "--test-only", "job.sh"], cwd=tmp_path, env=slurm, capture_output=True, text=True, timeout=60
    )
    assert tried.returncode == 0, tried.stderr
    assert "using 16 processors" in tried.stderr
    given = ["sbatch", "--parsable", "-o", str(tmp_path / "out"), "job.sh"]
    job = subprocess.run(given, cwd=tmp_path, env=slurm, capture_output=True, text=True, timeout=60).stdout.strip()
    assert job.isdigit()
    run = RunFolder(tmp_path / "runs" / "run")
    try:
        assert until(lambda: not said(slurm, "squeue", "-h", "-j", job), 400.0), (tmp_path / "out").read_text()
        out = (tmp_path / "out").read_text()
        assert "JobState=COMPLETED" in said(slurm, "scontrol", "show", "job", job), out
        summary = json.loads(run.summary.read_text())
        assert (summary["outcome"], summary["steps"]) == ("finished", 2), out
    finally:
        if (run.path / "run.json").is_file():
            kill_all(of_run(run.id))
            run.remove_temporary()


def said(environment: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60).stdout


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
