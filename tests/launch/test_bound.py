"""Commands that run a launcher for themselves leave none behind, however they end."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.waiting import until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


@pytest.fixture(params=[["chaos", "--for", "600"], ["plan", "--probe", "600"]], ids=["chaos", "plan"])
def command(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[psutil.Process]:
    words = [*request.param, "--config", "quickstart", "--launch.runs-dir", str(tmp_path)]
    with subprocess.Popen([sys.executable, "-m", "asyncrl", *words], start_new_session=True) as started:
        yield psutil.Process(started.pid)
        started.kill()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_launcher_ends_with_the_command_that_started_it(command: psutil.Process, how: signal.Signals) -> None:
    assert until(lambda: launchers(command))
    (launcher,) = launchers(command)
    command.send_signal(how)
    try:
        assert until(lambda: not launcher.is_running() or launcher.status() == psutil.STATUS_ZOMBIE)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher.kill()  # its guardian ends the rest


def launchers(command: psutil.Process) -> list[psutil.Process]:
    return [child for child in command.children() if "launch" in child.cmdline()]
