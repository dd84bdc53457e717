"""Fills and slows the disk of a run: the run gets a disk of its own, an ext4 image mounted as the run folder.

At the end the contents move into an ordinary run folder. Only root may mount.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time
from pathlib import Path

from asyncrl.chaos.injector import Injector
from asyncrl.chaos.plan import Fault
from asyncrl.errors import ConfigError, RunError
from asyncrl.run_folder import RunFolder

NEEDS = ("mkfs.ext4", "mount", "umount", "fsfreeze")
SIZE_BYTES = 32 << 30
"""Size of the image, a sparse file."""
BLOCK_BYTES = 4096
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
COMMAND_S = 60.0
SLOW = 'i=0; while [ $i -lt "$2" ]; do fsfreeze -f "$1" && sleep 0.4; fsfreeze -u "$1"; sleep 0.1; i=$((i+1)); done'
SLOW_S = 0.5
"""Seconds of one cycle, in which the disk is frozen for 0.4 s. A child shell runs a fixed number of cycles, so that the
disk does not stay frozen if `asyncrl chaos` itself is killed."""


class Disk(Injector):
    def __init__(self, kind: str) -> None:
        """`kind`: the requested kind, for the error. Raises ConfigError."""
        missing = [program for program in NEEDS if shutil.which(program, path=PATH) is None]
        why = ""
        if os.geteuid() != 0:
            why = "this user is not root"
        elif missing:
            why = f"{missing[0]} is not installed"
        elif not Path("/dev/loop-control").exists():
            why = "the kernel has no loop devices"
        if why:
            raise ConfigError(f"--kill {kind} mounts a disk of its own for the run, and {why}. Leave it out.")
        self._slow: subprocess.Popen[bytes] | None = None

    def open(self, run: RunFolder) -> None:
        """Raises RunError when the image cannot be mounted, e.g. in a container without the permission."""
        self._at = run.path
        self._image, self._kept = (run.path.with_name(f".{run.name}.{what}") for what in ("disk", "kept"))
        if run.path.exists():
            raise RunError(f"{run.path} exists already: choose another launch.name.")
        run.path.mkdir(parents=True)
        try:
            with self._image.open("xb") as image:
                image.truncate(SIZE_BYTES)
            # No blocks are reserved for root: full is full.
            _run("mkfs.ext4", "-q", "-F", "-m", "0", str(self._image))
            _run("mount", "-o", "loop,noatime", str(self._image), str(self._at))
        except (OSError, RunError):
            self._image.unlink(missing_ok=True)
            run.path.rmdir()
            raise
        (self._at / "lost+found").rmdir()

    def begin(self, fault: Fault) -> str:
        if fault.kind == "disk-full":
            return f"{_fill(self._at / 'ballast') >> 20} MB were free"
        self._slow = subprocess.Popen(
            ["sh", "-c", SLOW, "sh", str(self._at), str(round(fault.for_s / SLOW_S))],
            env={**os.environ, "PATH": PATH}, start_new_session=True, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        return ""

    def end(self, fault: Fault) -> None:
        if fault.kind == "disk-full":
            (self._at / "ballast").unlink(missing_ok=True)
        elif self._slow is not None:
            self._slow.wait(COMMAND_S)
            self._slow = None

    def close(self) -> None:
        """Raises RunError, naming the mount, when it cannot be unmounted."""
        if not self._at.is_mount():
            return
        shutil.copytree(self._at, self._kept, symlinks=True)
        _run("umount", str(self._at), patience_s=COMMAND_S)
        self._at.rmdir()
        self._kept.rename(self._at)
        self._image.unlink()


def _fill(ballast: Path) -> int:
    """Takes all free space; gives its size in bytes."""
    with ballast.open("ab") as file:
        size = shutil.disk_usage(ballast.parent).free
        while size >= BLOCK_BYTES:
            try:
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
            size = min(size // 2, shutil.disk_usage(ballast.parent).free)
        return os.fstat(file.fileno()).st_size


def _run(*command: str, patience_s: float = 0.0) -> None:
    """Runs a command, again after failures for `patience_s`. Raises RunError with its output."""
    deadline = time.monotonic() + patience_s
    while True:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_S, env={**os.environ, "PATH": PATH}
        )
        if done.returncode == 0:
            return
        if time.monotonic() >= deadline:
            raise RunError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}.")
        time.sleep(0.2)
