from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import psutil
import pytest

from asyncrl.actors.engines.servers.process import ServerProcess, _alive
from tests.waiting import until

SERVER = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
"""A server with a process of its own."""
OWNER = f"""
import sys, time
from asyncrl.actors.engines.servers.process import ServerProcess

server = ServerProcess([sys.executable, "-c", {SERVER!r}], {{}})
server.start()
time.sleep(600)
"""


def family(pid: int, size: int, besides: Collection[psutil.Process] = ()) -> list[psutil.Process]:
    """`besides`: what other tests keep below this process."""

    def now() -> list[psutil.Process]:
        return [p for p in psutil.Process(pid).children(recursive=True) if p not in besides]

    deadline = time.monotonic() + 20
    while len(found := now()) < size and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(found) == size
    return found


def gone(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + 10
    while any(map(_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [process for process in processes if _alive(process)]


def test_it_ends_with_an_owner_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER]) as owner:
        try:
            left = family(owner.pid, 3)
        finally:
            owner.kill()
    gone(left)


def test_stop_leaves_nothing_and_an_end_is_told() -> None:
    before = psutil.Process().children(recursive=True)
    server = ServerProcess([sys.executable, "-c", SERVER], {})
    server.start()
    assert server.ended() == ""
    left = family(psutil.Process().pid, 3, before)
    server.stop()
    gone(left)
    failed = ServerProcess([sys.executable, "-c", "raise SystemExit(3)"], {})
    failed.start()
    deadline = time.monotonic() + 20
    while not failed.ended() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "exit code 3" in failed.ended()
    failed.stop()


@pytest.mark.parametrize("environment", [{}, {"PATH": "/nowhere"}], ids=["no such file", "not on its PATH"])
def test_a_program_that_is_not_there_is_told_before_a_process_is(environment: dict[str, str]) -> None:
    program = "sleep" if environment else "gone/bin/python"
    server = ServerProcess([program, "60"], environment)
    with pytest.raises(FileNotFoundError, match=f"there is no program '{program}' here"):
        server.start()
    assert server.ended() == ""
    server.stop()


def test_a_program_that_does_not_start_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "other_machine"
    program.write_bytes(b"\x7fELF of another machine")
    program.chmod(0o700)
    server = ServerProcess([str(program)], {})
    server.start()
    assert until(lambda: bool(server.ended()))
    assert "exit code 127" in server.ended()
    assert capfd.readouterr().err.splitlines() == [f"{program} does not start: Exec format error"]
    server.stop()


@pytest.mark.parametrize("times", [1, 2])
def test_stop_is_harmless_when_repeated_or_early(times: int) -> None:
    server = ServerProcess(["true"], {})
    for _ in range(times):
        server.stop()
