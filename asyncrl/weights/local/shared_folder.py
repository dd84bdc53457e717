"""A folder shared by processes of one host: one of them writes to it, the last one removes it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

from asyncrl.errors import RunError

STAND_BY_S = 0.2
ATTEMPTS = 100


class SharedFolder:
    def __init__(self, dir: Path) -> None:
        self.dir = dir
        self._users: int | None = None

    def enter(self) -> None:
        """Create or join the folder. Raises RunError if it belongs to another user."""
        owned(self.dir.parent)
        for _ in range(ATTEMPTS):
            owned(self.dir)
            with contextlib.suppress(FileNotFoundError):
                if self._use():
                    return
        raise RunError(f"{self.dir} is removed again and again while it is made")

    def leave(self) -> None:
        """Leave the folder; the last process removes it."""
        if self._users is None:
            return
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.dir, ignore_errors=True)
        os.close(self._users)
        self._users = None

    @contextlib.contextmanager
    def alone(self, stop: threading.Event) -> Iterator[bool]:
        """Wait until this is the process that writes. Yields False if `stop` was set before."""
        file = os.open(self.dir / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not stop.is_set():
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    stop.wait(STAND_BY_S)
                else:
                    yield True
                    return
            yield False
        finally:
            os.close(file)

    def _use(self) -> bool:
        """Register this process. False, or FileNotFoundError: the last process has removed the folder meanwhile."""
        path = self.dir / ".users"
        users = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(users, fcntl.LOCK_SH)  # waits as long as that takes
            if os.stat(path).st_ino == os.fstat(users).st_ino:
                self._users = users
        finally:
            if self._users is None:
                os.close(users)
        return self._users is not None


def owned(folder: Path) -> None:
    """Make a folder that only its owner can use. Raises RunError if one exists that others can use."""
    folder.mkdir(mode=0o700, exist_ok=True)
    stat = folder.stat()
    if stat.st_uid != os.getuid() or stat.st_mode & 0o077:
        raise RunError(f"{folder} belongs to, or is open for, others than this user: remove it, and start again.")
