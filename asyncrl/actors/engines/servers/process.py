"""A server that an actor starts. It ends with the actor, however the actor ends, and with every process it started.

    actor ──pipe, never written to──> python process.py COMMAND
                                        starts COMMAND; when the pipe closes, ends it and all that it started

The supervisor is a small process of its own, because an actor that is killed can end nothing.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

STOP_S, LOOK_S = 5.0, 1.0
"""Seconds to end in order; seconds between two looks at what the server has started."""


class ServerProcess:
    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command, self._environment = list(command), dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server; its output goes to this process's stderr. Raises FileNotFoundError without its program."""
        program = self._command[0]
        if shutil.which(program, path=self._environment.get("PATH")) is None:
            raise FileNotFoundError(f"there is no program {program!r} here, or it is not executable")
        # By path: as a module it would import the whole package first. -P: `import http` must not find the http.py in
        # this folder.
        supervisor = [sys.executable, "-P", __file__, *self._command]
        # stdout is reserved for the caller's own output.
        self._process = subprocess.Popen(
            supervisor, stdin=subprocess.PIPE, stdout=2, env=os.environ | self._environment
        )

    def ended(self) -> str:
        """Why the server ended; empty while it runs."""
        code = self._process.poll() if self._process is not None else None
        return "" if code is None else f"the server ended with exit code {code}; the log says why: {self._command[:4]}"

    def stop(self) -> None:
        """Returns when no process of the server is left."""
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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _alive(process: psutil.Process) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _supervise(command: Sequence[str]) -> int:
    """Wait until the command, or the owner of this process, has ended; then end all that the command started."""
    # The actor handles a terminal's Ctrl-C, and then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        server = psutil.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:  # e.g. of another machine's format
        print(f"{command[0]} does not start: {error.strerror}", file=sys.stderr)
        return 127
    family: list[Any] = [server]
    owned = True
    while owned and server.poll() is None:
        owned = not select.select([sys.stdin], [], [], LOOK_S)[0]
        # Listed while the server lives: afterwards its children cannot be found.
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
    sys.exit(_supervise(sys.argv[1:]))
