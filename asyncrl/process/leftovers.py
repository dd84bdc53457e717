"""Removes folders for sockets and weights that dead launches left behind: their launcher and guardian were both killed,
or a Ray host was lost. The next launch on the host does this.

A process locks a folder that it uses; the kernel releases the lock when that process ends, by any cause.
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
"""A folder is stale when it is unlocked and unchanged for so many seconds; a new one may not be locked yet."""


_files: dict[Path, IO[str]] = {}


def lock(folder: Path) -> None:
    """Locks `folder` as long as this process lives, so that it does not count as left over."""
    release(folder)
    file = (folder / LOCK).open("a")
    fcntl.flock(file, fcntl.LOCK_SH)
    _files[folder] = file


def release(folder: Path) -> None:
    if (file := _files.pop(folder, None)) is not None:
        file.close()


@contextlib.contextmanager
def in_memory(what: str, parent: Path | None = None) -> Iterator[Path]:
    """A temporary folder, in `parent` or in shared memory where there is some. It is locked, since its process may be
    killed while it holds a whole model."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix=f"asyncrl-{what}-", dir=parent or memory) as name:
        folder = Path(name)
        lock(folder)
        try:
            yield folder
        finally:
            release(folder)


def remove(parents: Iterable[Path] | None = None) -> list[Path]:
    """Removes this user's stale folders and gives their paths. `parents`: where to search; None: where launches create
    them."""
    removed = []
    for folder in (f for p in parents or (Path("/dev/shm"), Path(tempfile.gettempdir()), Path("/tmp"))
                   for f in p.glob("asyncrl-*")):  # fmt: skip
        with contextlib.suppress(OSError):  # removed meanwhile, or not ours
            stat = folder.lstat()
            if stat.st_uid == os.getuid() and time.time() - stat.st_mtime > STALE_S and _is_free(folder):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    return removed


def _is_free(folder: Path) -> bool:
    """Whether no process uses the folder. Raises FileNotFoundError when it does not belong to a launch."""
    with (folder / LOCK).open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
