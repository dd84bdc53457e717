"""The process that survives the launcher, and ends what the launcher can no longer end.

    launcher ──pipe──> guardian: waits for the end of file, which comes when the launcher ends, by any cause
                          │ twice a second: notes the launcher's descendants
                          ▼
       kills the run's processes, those noted and those that carry its id; removes sockets and shared memory; exits

It is the way out in every case: a launcher that ends in order closes the pipe itself and waits for the guardian.
It leads a session of its own, so that no Ctrl-C reaches it.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil

from asyncrl.launch.processes import kill_all, of_run

NOTE_MS = 500
SWEEP_S = 10.0
"""How long it goes on killing; a process that then still lives is stuck in the kernel."""


def guard(pipe: int, launcher: int, run_id: str, folders: list[Path]) -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    poll = select.poll()
    poll.register(pipe, select.POLLIN | select.POLLHUP)
    noted: set[psutil.Process] = set()
    while not poll.poll(NOTE_MS):
        noted = _descendants(launcher)
    noted |= _descendants(launcher)  # a launcher that ends in order waits for this
    deadline = time.monotonic() + SWEEP_S
    while (left := {*_running(noted), *of_run(run_id)}) and time.monotonic() < deadline:
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
    guard(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], [Path(folder) for folder in sys.argv[4:]])
