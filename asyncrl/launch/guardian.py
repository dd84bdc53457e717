"""The process that survives the launcher, and ends what the launcher can no longer end.

    launcher ──pipe──> guardian: waits for the end of file, which comes when the launcher ends, by any cause
                          │ twice a second: notes the launcher's descendants
                          ▼
       kills the run's processes, those noted and those that carry its id; removes sockets and shared memory; exits

It is the way out in every case: a launcher that ends in order closes the pipe itself and waits for the guardian.
It leads a session of its own, so that no Ctrl-C reaches it. Under Ray each role's host has one as well (`outlive`).
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from asyncrl.launch.processes import RUN_MARKER, kill_all, marked, python

if TYPE_CHECKING:
    from asyncrl.run_folder import RunFolder

NOTE_MS = 500
SWEEP_S = 10.0
"""How long it goes on killing; a process that then still lives is stuck in the kernel."""
RELEASE_S = 15.0


class Guardian:
    """The process, as the launcher has it, and the pipe that tells it when to act."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._start()

    def ensure(self) -> None:
        """Starts another one when somebody killed it."""
        if self._process.poll() is not None:
            os.close(self._pipe)
            self._start()

    def release(self) -> None:
        """Lets it end whatever is left of the run, and waits for that, at most `RELEASE_S`: it goes on by itself."""
        os.close(self._pipe)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(RELEASE_S)

    def _start(self) -> None:
        reading, self._pipe = os.pipe()
        folders = [str(self._run.sockets), str(self._run.shm), str(self._run.private)]
        self._process = subprocess.Popen(_command(reading, RUN_MARKER, self._run.id, *folders), **_options(reading))
        os.close(reading)


def outlive(name: str, value: str) -> int:
    """A guardian of this process that is not its child: Ray kills the children of a worker that ends, and what those
    had started would live on. It ends what descends from this process, and what `name` marks with `value`.

    Gives the writing end of its pipe, which is to stay open.
    """
    reading, writing = os.pipe()
    shell = ("sh", "-c", '"$@" &', "sh")  # whose child it is then, and the shell ends at once
    subprocess.run((*shell, *_command(reading, name, value)), check=True, **_options(reading))
    os.close(reading)
    return writing


def _command(pipe: int, name: str, value: str, *folders: str) -> tuple[str, ...]:
    return python("asyncrl.launch.guardian", str(pipe), str(os.getpid()), name, value, *folders)


def _options(pipe: int) -> dict[str, Any]:
    return {
        "pass_fds": [pipe], "start_new_session": True, "stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL,
    }  # fmt: skip


def guard(pipe: int, launcher: int, mark: tuple[str, str], folders: list[Path]) -> None:
    """`mark`: a variable of the environment and its value, by which the processes to be ended are known."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    poll = select.poll()
    poll.register(pipe, select.POLLIN | select.POLLHUP)
    noted: set[psutil.Process] = set()
    while not poll.poll(NOTE_MS):
        noted = _descendants(launcher)
    noted |= _descendants(launcher)  # a launcher that ends in order waits for this
    deadline = time.monotonic() + SWEEP_S
    while (left := {*_running(noted), *marked(*mark)}) and time.monotonic() < deadline:
        kill_all(list(left))
        time.sleep(0.02)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _descendants(launcher: int) -> set[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return {p for p in psutil.Process(launcher).children(recursive=True) if p.pid != os.getpid()}
    return set()


def _running(noted: set[psutil.Process]) -> set[psutil.Process]:
    """Those that still live; a pid that was given to another process since is left out."""
    running = set()
    for process in noted:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                running.add(process)
    return running


if __name__ == "__main__":
    pipe, launcher, name, value, *rest = sys.argv[1:]
    guard(int(pipe), int(launcher), (name, value), [Path(folder) for folder in rest])
