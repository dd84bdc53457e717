"""A server that an actor starts: it ends with the actor, however that ends, with every process that it has started.

actor ──pipe, never written to──> python -m asyncrl.actors.engines.server_process COMMAND
                                    starts COMMAND; at the end of the pipe, ends it and all that it started
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

import psutil

STOP_S = 5.0


class ServerProcess:
    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command, self._environment = list(command), dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Its output goes where this process's goes."""
        keeper = [sys.executable, "-m", __spec__.name, *self._command]
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


def _keep(command: Sequence[str]) -> int:
    # A terminal's Ctrl-C is the actor's affair, which then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = psutil.Popen(command, stdin=subprocess.DEVNULL)

    def end_with_the_actor() -> None:
        os.read(0, 1)
        _end(server)

    threading.Thread(target=end_with_the_actor, daemon=True).start()
    code = int(server.wait() or 0)
    return code if code >= 0 else 128 - code


def _end(server: psutil.Popen) -> None:
    try:
        family = [*server.children(recursive=True), server]
    except psutil.NoSuchProcess:
        return
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, left = psutil.wait_procs(family, timeout=STOP_S)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    sys.exit(_keep(sys.argv[1:]))
