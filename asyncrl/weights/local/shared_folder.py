"""A folder that processes of one host have in common: one of them writes to it, the last one removes it."""

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
        """From now on it is there. Raises RunError when it belongs to somebody else."""
        owned(self.dir.parent)
        for _ in range(ATTEMPTS):
            owned(self.dir)
            with contextlib.suppress(FileNotFoundError):
                if self._use():
                    return
        raise RunError(f"{self.dir} is removed again and again while it is made")

    def leave(self) -> None:
        """Removes it, unless others are there."""
        if self._users is None:
            return
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.dir, ignore_errors=True)
        os.close(self._users)
        self._users = None

    @contextlib.contextmanager
    def alone(self, stop: threading.Event) -> Iterator[bool]:
        """Waits until this is the one process that writes. False: `stop` was set before that."""
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
        """False: the last one there has removed it meanwhile. Raises FileNotFoundError for the same reason."""
        path = self.dir / ".users"
        users = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(users, fcntl.LOCK_SH)  # for as long as that takes
            if os.stat(path).st_ino == os.fstat(users).st_ino:
                self._users = users
        finally:
            if self._users is None:
                os.close(users)
        return self._users is not None


def owned(folder: Path) -> None:
    """Makes a folder for its owner alone. Raises RunError when it is there and is not."""
    folder.mkdir(mode=0o700, exist_ok=True)
    stat = folder.stat()
    if stat.st_uid != os.getuid() or stat.st_mode & 0o077:
        raise RunError(f"{folder} belongs to, or is open for, others than this user: remove it, and start again.")
