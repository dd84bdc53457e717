"""A role's whole group ends with the launcher, even a role that runs no Python any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

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
    assert process.wait(10) == -signal.SIGKILL
    assert until(lambda: not running(grandchild), 5.0)


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
    assert process.wait(20) == -signal.SIGKILL


def test_without_a_launcher_nothing_happens() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "ASYNCRL_LIFELINE"}
    code = (
        "from asyncrl.process import lifeline; lifeline.bind_to_launcher(); "
        "import threading; print(threading.active_count())"
    )
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=30)
    assert out.stdout.strip() == "1", out.stderr
