"""A server that an actor starts: it ends with the actor, however that ends, with every process that it has started.

    actor ──pipe, never written to──> python process.py COMMAND
                                        starts COMMAND; at the end of the pipe, ends it and all that it started

What keeps the server is a small process of its own: an actor that is killed can end nothing.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

STOP_S, LOOK_S = 5.0, 1.0
"""For ending in order; between two looks at what the server has started."""


class ServerProcess:
    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command, self._environment = list(command), dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Its output goes where this process's goes."""
        # By its path: as a module it would import all of the package first. -P: `import http` must not find the
        # http.py beside this file.
        keeper = [sys.executable, "-P", __file__, *self._command]
        # stdout is for the caller's own words.
        self._process = subprocess.Popen(keeper, stdin=subprocess.PIPE, stdout=2, env=os.environ | self._environment)

    def ended(self) -> str:
        """Why it is over; empty while it runs."""
        code = self._process.poll() if self._process is not None else None
        return "" if code is None else f"the server ended with exit code {code}; the log says why: {self._command[:4]}"

    def stop(self) -> None:
        """Returns when nothing of it is left."""
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            process.wait(2 * STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _alive(process: psutil.Process) -> bool:
    """A process that only waits for its parent to hear of its end is none."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _keep(command: Sequence[str]) -> int:
    """Until the command has ended, or this process's owner: then all is ended that the command had started."""
    # A terminal's Ctrl-C is the actor's affair, which then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = psutil.Popen(command, stdin=subprocess.DEVNULL)
    family: list[Any] = [server]
    owned = True
    while owned and server.poll() is None:
        owned = not select.select([sys.stdin], [], [], LOOK_S)[0]
        # Looked up while the server lives: afterwards nobody knows whose children they were.
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [*server.children(recursive=True), server]
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    deadline = time.monotonic() + STOP_S
    while any(map(_alive, family)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in filter(_alive, family):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    code = int(server.wait() or 0)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(_keep(sys.argv[1:]))
