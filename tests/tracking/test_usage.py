"""What is measured of the run's processes."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from asyncrl.tracking.usage import Usage

MB = 1 << 20
CHILD = "import sys, time; held = bytearray(40 << 20); print(flush=True); time.sleep(100)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


def test_a_role_is_counted_with_its_children_and_the_launcher_without() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
            usage = Usage()
            pids = {"actor-0": process.pid, "launcher": process.pid, "lost": 1 << 22}
            first = usage.sample(pids, 1.0)
            assert first.keys() == {"system/rss_bytes/actor-0", "system/rss_bytes/launcher"}
            assert first["system/rss_bytes/actor-0"] > first["system/rss_bytes/launcher"] + 40 * MB
            second = usage.sample(pids, 2.0)
            assert 0.0 <= second["system/cpu/actor-0"] < 2.0
        finally:
            for child in psutil.Process(process.pid).children():
                child.kill()


def test_many_roles_cost_one_look_at_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Damaged reports of a thousand roles kept the launcher busy: each looked for its children among all processes."""
    looked: list[str] = []
    process = psutil.Process
    monkeypatch.setattr(psutil, "process_iter", lambda: looked.append("all") or iter(()))
    monkeypatch.setattr(psutil, "Process", lambda pid: looked.append("one") or process(pid))
    assert len(Usage().sample({f"actor-{n}": 1 for n in range(1000)}, 1.0)) == 1000
    assert looked == ["all", "one"]
