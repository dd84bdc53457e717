"""The whole loop with sockets as between hosts: tcp, CURVE, weights through the server and a mirror."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from asyncrl.keys import Keys
from asyncrl.launch.processes import kill_all, of_run
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.sinks.jsonl import by_step

ROOT = Path(__file__).parents[1]
FIELDS = {  # steps enough for several reports of the weights server
    "launch.host": "127.0.0.1", "weights.channel": "zmq", "learner.steps": 15,
    "actors.count": 1, "learner.groups_per_step": 4,
    "learner.group_size": 4, "buffer.capacity": 64, "eval.tasks": 0, "launch.name": "run",
    "tracking.system_s": 0.5,
}  # fmt: skip


@pytest.mark.system
@pytest.mark.timeout(120)
def test_a_run_over_tcp_with_keys_and_weights_through_a_server(tmp_path: Path) -> None:
    words = [word for name, value in FIELDS.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "asyncrl", "launch", "--config", "configs/quickstart.yaml", *words]
    run = RunFolder(tmp_path / "run")
    launcher = subprocess.Popen(
        [*command, "--launch.runs-dir", str(tmp_path)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not (run.private / "buffer").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        keys = Keys.load(run.private / "keys")
        pids = [pid for pid, _ in run.record()["processes"].values()]
        shown = [word.encode() for pid in pids for word in psutil.Process(pid).cmdline()]
        out, _ = launcher.communicate(timeout=110)
        assert launcher.returncode == 0, out
        shown += [file.read_bytes() for file in run.path.rglob("*") if file.is_file()] + [out.encode()]
        assert not any(secret in text for secret in (keys.server_secret, keys.client_secret) for text in shown)
        summary = json.loads(run.summary.read_text())
        assert (summary["outcome"], summary["steps"], summary["restarts"]) == ("finished", FIELDS["learner.steps"], {})
        assert 0 < summary["max_staleness_seen"] <= 2, "newer weights arrived"
        for role in ("buffer", "weights"):
            assert f"{role} listens on tcp://127.0.0.1:" in run.log(role).read_text()
        assert max(r.get("weights/sent_bytes", 0.0) for r in by_step(run.metrics)) > 0
        assert not run.private.exists(), "the keys are gone with the run"
    finally:
        launcher.kill()
        launcher.wait(10)
        if (run.path / "run.json").exists():
            kill_all(of_run(run.id))
            run.remove_temporary()
