"""The process that survives the launcher and ends what the launcher can no longer end.

    launcher ──pipe──> guardian: waits for the end of file, which comes when the launcher ends by any cause
                          │ twice a second: records the launcher's descendants
                          ▼
       kills the recorded processes and those that carry the run's id; removes sockets and shared memory; exits

Every launch ends this way: a launcher that ends in order closes the pipe itself and waits for the guardian. The
guardian leads a session of its own, so that no Ctrl-C reaches it. Under Ray each role's host has one, too (`outlive`).
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

RECORD_MS = 500
SWEEP_S = 10.0
"""Seconds for killing; a process that still lives then is stuck in the kernel."""
RELEASE_S = 15.0


class Guardian:
    """The launcher's handle of the guardian, with the pipe whose end makes it act."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._start()

    def ensure(self) -> None:
        """Starts another guardian when it was killed."""
        if self._process.poll() is not None:
            os.close(self._pipe)
            self._start()

    def release(self) -> None:
        """Lets it end whatever is left of the run, and waits for at most `RELEASE_S`; then it continues alone."""
        os.close(self._pipe)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(RELEASE_S)

    def _start(self) -> None:
        reading, self._pipe = os.pipe()
        folders = [str(self._run.sockets), str(self._run.shm), str(self._run.private)]
        self._process = subprocess.Popen(_command(reading, RUN_MARKER, self._run.id, *folders), **_options(reading))
        os.close(reading)


def outlive(name: str, value: str) -> int:
    """Starts a guardian of this process that is not its child: Ray kills the children of a worker that ends, but not
    their descendants. It ends the descendants of this process and those whose variable `name` is `value`.

    Gives the writing end of its pipe, which must stay open.
    """
    reading, writing = os.pipe()
    shell = ("sh", "-c", '"$@" &', "sh")  # the guardian becomes the child of a shell that ends at once
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
    """Waits for the end of `pipe`, then cleans up. `mark`: the environment variable, and its value, of the processes to
    end."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    poll = select.poll()
    poll.register(pipe, select.POLLIN | select.POLLHUP)
    recorded: set[psutil.Process] = set()
    while not poll.poll(RECORD_MS):
        recorded = _descendants(launcher)
    recorded |= _descendants(launcher)  # a launcher that ends in order waits for this
    deadline = time.monotonic() + SWEEP_S
    while (left := {*_running(recorded), *marked(*mark)}) and time.monotonic() < deadline:
        kill_all(list(left))
        time.sleep(0.02)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _descendants(launcher: int) -> set[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return {p for p in psutil.Process(launcher).children(recursive=True) if p.pid != os.getpid()}
    return set()


def _running(recorded: set[psutil.Process]) -> set[psutil.Process]:
    """The recorded processes that still live; reused pids are left out."""
    running = set()
    for process in recorded:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                running.add(process)
    return running


if __name__ == "__main__":
    pipe, launcher, name, value, *rest = sys.argv[1:]
    guard(int(pipe), int(launcher), (name, value), [Path(folder) for folder in rest])
