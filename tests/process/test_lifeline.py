"""A role's whole group ends with the launcher, even a role that runs no Python any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.fakes import running
from tests.waiting import until

ROLE = """
import os, signal, subprocess, sys, threading
if {without_thread}:
    threading.Thread.start = lambda self: None
from asyncrl.process import lifeline
lifeline.bind_to_launcher()
child = subprocess.Popen(["sleep", "300"])
print(child.pid, flush=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.kill(os.getpid(), signal.SIGSTOP) if {without_thread} else child.wait()
"""


@pytest.mark.parametrize(
    "without_thread",
    [
        False,
        pytest.param(True, marks=pytest.mark.skipif(sys.platform != "linux", reason="F_SETSIG is Linux's")),
    ],
)
def test_the_group_dies_when_the_pipe_closes(without_thread: bool) -> None:
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", ROLE.format(without_thread=without_thread)],
        env={**os.environ, "ASYNCRL_LIFELINE": str(reading)},
        pass_fds=[reading],
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    os.close(reading)
    assert process.stdout is not None
    grandchild = int(process.stdout.readline())
    assert running(process.pid)
    assert running(grandchild)
    os.close(writing)
    assert process.wait(60) == -signal.SIGKILL
    assert until(lambda: not running(grandchild))


def test_a_launcher_that_is_gone_before_the_role_arms_the_pipe() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from asyncrl.process import lifeline; lifeline.bind_to_launcher(); import time; time.sleep(60)",
        ],
        env={**os.environ, "ASYNCRL_LIFELINE": str(reading)},
        pass_fds=[reading],
        start_new_session=True,
    )
    os.close(reading)
    assert process.wait(60) == -signal.SIGKILL


SLOW = """
import importlib.abc, os, sys, time

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in ("torch", "numpy", "msgspec", "zmq", "pydantic", "yaml"):
            os.write(1, name.encode() + b"\\n")
            time.sleep(60)

if any(word.startswith("asyncrl.") for word in sys.orig_argv):
    sys.meta_path.insert(0, Slow())
"""
"""As `sitecustomize`: the first package from outside that a role imports takes a minute, as torch may."""


@pytest.mark.parametrize("role", ["learner", "actors", "buffer", "weights"])
def test_a_role_that_still_imports_ends_with_the_launcher(role: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", f"asyncrl.{role}", str(tmp_path / "no-run")],
        env={
            **os.environ, "ASYNCRL_LIFELINE": str(reading),
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])]),
        },
        pass_fds=[reading], start_new_session=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(reading)
    try:
        assert process.stdout is not None
        assert process.stdout.readline(), "it imports no package that is slow"
        os.close(writing)
        assert process.wait(60) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()


def test_without_a_launcher_nothing_happens() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "ASYNCRL_LIFELINE"}
    code = (
        "from asyncrl.process import lifeline; lifeline.bind_to_launcher(); "
        "import threading; print(threading.active_count())"
    )
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=30)
    assert out.stdout.strip() == "1", out.stderr
