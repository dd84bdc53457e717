"""Folders for sockets and weights in memory whose launch is over although nobody removed them: launcher and guardian
were both killed, or a host of Ray's was lost. The next launch on the host does.

A folder in use is locked by who uses it, and the kernel lets go of the lock when that process ends, by any cause.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

LOCK = ".held"
STALE_S = 600.0
"""Unlocked and unchanged for so long: what has just been made is not locked yet."""


_files: dict[Path, IO[str]] = {}


def hold(folder: Path) -> None:
    """From now on, and as long as this process lives, nobody takes `folder` for left over."""
    let_go(folder)
    file = (folder / LOCK).open("a")
    fcntl.flock(file, fcntl.LOCK_SH)
    _files[folder] = file


def let_go(folder: Path) -> None:
    if (file := _files.pop(folder, None)) is not None:
        file.close()


@contextlib.contextmanager
def in_memory(what: str, parent: Path | None = None) -> Iterator[Path]:
    """A folder for a moment, in `parent` or in shared memory where there is some; held, since who makes it may be
    killed with a whole model in it."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix=f"asyncrl-{what}-", dir=parent or memory) as name:
        folder = Path(name)
        hold(folder)
        try:
            yield folder
        finally:
            let_go(folder)


def remove(parents: Iterable[Path] | None = None) -> list[Path]:
    """Removes those of this user; gives what was removed. `parents`: where to look, else where launches make them."""
    removed = []
    for folder in (f for p in parents or (Path("/dev/shm"), Path(tempfile.gettempdir()), Path("/tmp"))
                   for f in p.glob("asyncrl-*")):  # fmt: skip
        with contextlib.suppress(OSError):  # it went meanwhile, or another user's
            about = folder.lstat()
            if about.st_uid == os.getuid() and time.time() - about.st_mtime > STALE_S and _is_free(folder):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    return removed


def _is_free(folder: Path) -> bool:
    """Raises FileNotFoundError when it is no folder of a launch."""
    with (folder / LOCK).open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
