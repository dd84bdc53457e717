"""A listening tcp socket, and the process that takes its connections (`__main__.py`), started again if it ends."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

from asyncrl.acceptor.__main__ import FRAME_BYTES, TAKEN

log = logging.getLogger(__name__)

_END_S = 4.0
"""Longest wait for the process when its role ends: it still hands over the role's last replies."""
_AGAIN_S = 0.1
"""Seconds between the end of the process and its next start, and between two tries to start it."""
_SEALED_BYTES = 33
"""What CURVE adds to a frame."""
_TOLD = 8
"""The role reports what it received from a peer once that is this fraction (1/8) of `most`."""
_BACKLOG = 512
_NAME_BYTES = 6
"""Bytes of an address that Linux assigned to a unix socket: NUL and five hexadecimal digits."""


class AcceptorProcess:
    """`path` is the socket that the role binds, `address` what its peers connect to."""

    def __init__(self, name: str, host: str, folder: Path | None, most: int) -> None:
        """`folder`: holds the launch's sockets and is removed with it; None on other hosts. `most`: bytes that a peer
        may send ahead of what the role has received; more than the largest message.

        Raises OSError if this host has no such address.
        """
        self._name, self._closing, self._most = name, threading.Event(), most
        self._taken: dict[int, int] = {}
        """Bytes received and not yet reported, by the connection's file descriptor in the role."""
        self._listening = socket.create_server((host, 0), backlog=_BACKLOG)
        there = folder if folder is not None and folder.is_dir() else None
        self._folder = Path(tempfile.mkdtemp(prefix="asyncrl-", dir=there or _short_folder()))
        self.path = self._folder / "role"
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._keep, name=f"{name} acceptor", daemon=True)

    @property
    def address(self) -> str:
        host, port = self._listening.getsockname()[:2]
        return f"tcp://{host}:{port}"

    def open(self) -> None:
        """Opens the port; call it once the role has bound `path`."""
        self._process = self._start()
        self._thread.start()

    def received(self, file: int, sizes: Iterable[int]) -> None:
        """Counts a message. `file`: the descriptor of its connection (zmq.SRCFD); `sizes`: the bytes of each frame."""
        taken = self._taken.pop(file, 0)
        for size in sizes:
            sealed = size + _SEALED_BYTES
            taken += sealed + (2 if sealed < 256 else 9) + FRAME_BYTES
        if taken < self._most // _TOLD or not self._say(file, taken):
            self._taken[file] = taken

    def _say(self, file: int, taken: int) -> bool:
        """Reports `taken` to the process; False if its pipe is full."""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            connection = socket.socket(fileno=file)  # ZeroMQ's: borrowed to read the address, and not closed
            try:
                name = connection.getpeername()
            finally:
                connection.detach()
            if isinstance(name, bytes) and len(name) == _NAME_BYTES:  # only the acceptor's ends have such an address
                os.write(self._process.stdin.fileno(), TAKEN.pack(name, taken))
        except BlockingIOError:
            return False
        except (OSError, ValueError):  # the connection or the process has ended
            return True
        return True

    def close(self) -> None:
        """Ends the process; call it once the role has closed its socket."""
        self._closing.set()
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._thread.join(_END_S)
            self._process.kill()
        self._listening.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> subprocess.Popen[str]:
        file = self._listening.fileno()
        program = Path(__file__).with_name("__main__.py")
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(program), str(file), str(self._most), str(self.path)],
            pass_fds=(file,),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        return process

    def _keep(self) -> None:
        """Passes on what the process reports, and starts another when it ends."""
        while True:
            process = self._process
            assert process is not None
            assert process.stdout is not None
            for line in process.stdout:
                log.warning("%s: %s", self._name, line.rstrip())
            code = process.wait()
            process.stdout.close()
            if self._closing.wait(_AGAIN_S):
                return
            log.warning("%s: the process that takes connections ended with %s; it is started again", self._name, code)
            if not self._start_again():
                return

    def _start_again(self) -> bool:
        """Starts another process as soon as this host can; False if the role closes first."""
        process, told = None, ""
        while process is None:
            try:
                process = self._start()
            except OSError as error:
                if told != str(error):
                    told = str(error)
                    log.error(
                        "%s: the process that takes connections cannot be started: %s; nobody can connect, and a "
                        "start is tried every %s s",
                        self._name, told, _AGAIN_S,
                    )  # fmt: skip
                if self._closing.wait(_AGAIN_S):
                    return False
        self._process = process
        if self._closing.is_set():  # `close` may have seen the process before this one
            assert process.stdin is not None
            process.stdin.close()
        return True


def _short_folder() -> str:
    """The folder for temporary files, or /tmp where its path is long: a socket's path has at most 107 bytes."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) < 60 else "/tmp"
