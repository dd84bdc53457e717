"""The machine: each judgement is a pure function of numbers; `look` measures them."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from asyncrl.buffer.ledger.storage.database import refuse_network_filesystem
from asyncrl.config import Config
from asyncrl.doctor.finding import Finding
from asyncrl.errors import ConfigError
from asyncrl.launch.preflight import MIN_FREE_MB
from asyncrl.run_folder import SOCKET_PATH_BYTES

OPEN_FILES = 4096
"""Below this, agents, tool servers and clients of one actor may run out of sockets."""
VERSIONS_IN_MEMORY = 3
"""Weights in shared memory at once: the served version, the next one, and one that an evaluation holds."""
_STA_UNSYNC = 0x40
_GB = 1 << 30


def look(config: Config, weights: int) -> Iterator[Finding]:
    """`weights`: bytes of the model's weights; 0 where they are not known."""
    yield system(sys.platform, hasattr(os, "sched_getaffinity"))
    yield processor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    yield memory(psutil.virtual_memory().available)
    yield shared_memory(_free(Path("/dev/shm")), weights)
    runs = Path(config.launch.runs_dir)
    yield disk(str(runs), _free(runs), config.buffer.max_disk_gb)
    yield ledger(Path(os.path.expandvars(config.buffer.dir)) if config.buffer.dir else runs)
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    yield temporary(tempfile.gettempdir())
    yield address(config.launch.host)
    yield clock(time.time(), Path(__file__).stat().st_mtime, _synchronised(), bool(config.launch.host))


def system(platform: str, linux_calls: bool) -> Finding:
    if platform == "linux" and linux_calls:
        return Finding("ok", "system", "Linux")
    return Finding("fix", "system", f"{platform}: asyncrl runs on Linux; use a Linux machine, a container or WSL 2.")


def processor(cores: int) -> Finding:
    if cores >= 2:
        return Finding("ok", "cores", str(cores))
    return Finding("note", "cores", "1: actor and learner share it, so a run takes about twice as long.")


def memory(free: int) -> Finding:
    if free >= 2 * _GB:
        return Finding("ok", "memory", f"{free / _GB:.1f} GB free")
    text = f"{free / _GB:.1f} GB free: each actor and the learner take about 0.5 GB beside the model; close something."
    return Finding("note", "memory", text)


def shared_memory(free: int | None, weights: int) -> Finding:
    if free is None:
        return Finding("note", "/dev/shm", "is not there: weights go through the run folder, which is slower.")
    needed = VERSIONS_IN_MEMORY * weights
    if free < needed:
        return Finding(
            "fix", "/dev/shm",
            f"{free / _GB:.2f} GB free, and {VERSIONS_IN_MEMORY} versions of the weights take {needed / _GB:.2f} GB: "
            "enlarge it (docker run --shm-size, or mount -o remount,size=... /dev/shm).",
        )  # fmt: skip
    return Finding("ok", "/dev/shm", f"{free / _GB:.1f} GB free")


def disk(folder: str, free: int | None, max_gb: float) -> Finding:
    if free is None or free >> 20 < MIN_FREE_MB:
        left = "cannot be read" if free is None else f"{free >> 20} MB free"
        text = f"launch.runs_dir {folder!r}: {left}, a run needs {MIN_FREE_MB} MB: free some, or name another folder."
        return Finding("fix", "disk", text)
    if free < max_gb * _GB:
        text = f"{free / _GB:.1f} GB free, less than buffer.max_disk_gb ({max_gb:g}): a long run may fill the disk."
        return Finding("note", "disk", text)
    return Finding("ok", "disk", f"{free / _GB:.1f} GB free at {folder!r}")


def ledger(folder: Path) -> Finding:
    """Whether the live ledger's folder is on a local disk."""
    try:
        refuse_network_filesystem(_existing(folder))
    except ConfigError as error:
        return Finding("fix", "ledger", str(error))
    return Finding("ok", "ledger", "its folder is on no network filesystem")


def open_files(limit: int) -> Finding:
    if limit == resource.RLIM_INFINITY or limit >= OPEN_FILES:
        return Finding("ok", "open files", "without a limit" if limit == resource.RLIM_INFINITY else f"at most {limit}")
    text = f"at most {limit}: agents and tool servers may need more; raise the hard limit (ulimit -H -n {OPEN_FILES})."
    return Finding("note", "open files", text)


def temporary(folder: str) -> Finding:
    if not os.access(folder, os.W_OK):
        return Finding("fix", "sockets", f"{folder} cannot be written: set TMPDIR to a folder for sockets.")
    if len(os.fsencode(folder)) >= SOCKET_PATH_BYTES - 40:
        return Finding("note", "sockets", f"{folder} is too long for a socket: /tmp is used instead.")
    return Finding("ok", "sockets", f"in {folder}")


def address(host: str) -> Finding:
    """Whether a port can be bound: on loopback for agents' endpoints, and on `launch.host`."""
    for name, of in ((host, "launch.host"), ("127.0.0.1", "loopback")):
        if name in ("", "auto"):
            continue
        try:
            with socket.create_server((name, 0)):
                pass
        except OSError as error:
            text = f"no port can be bound on {name} ({of}): {error.strerror or error}; give an address of this machine."
            return Finding("fix", "ports", text)
    return Finding("ok", "ports", "can be bound")


def clock(now: float, newest_file: float, synchronised: bool | None, several_hosts: bool) -> Finding:
    """`newest_file`: the time of a file that exists, so that a clock before it is wrong."""
    if now < newest_file - 60:
        when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(now))
        return Finding("fix", "clock", f"says {when} UTC, before asyncrl was installed: set it.")
    if synchronised is False and several_hosts:
        text = "is not synchronised, and launch.host means several hosts: their logs will not be in order; run NTP."
        return Finding("note", "clock", text)
    known = {True: ", synchronised", False: ", not synchronised", None: ""}[synchronised]
    return Finding("ok", "clock", f"plausible{known}")


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _free(folder: Path) -> int | None:
    """Free bytes of the disk of a folder, or of its first parent that exists; None for a missing /dev/shm."""
    if folder.parts[:2] == ("/", "dev") and not folder.is_dir():
        return None
    try:
        return shutil.disk_usage(_existing(folder)).free
    except OSError:
        return None


def _synchronised() -> bool | None:
    """What the kernel says about its clock; None: it does not tell."""
    try:
        timex = (ctypes.c_char * 512)()  # of zeros: it asks and sets nothing
        state: int = ctypes.CDLL(None).adjtimex(timex)
        offset = ctypes.sizeof(ctypes.c_long) * 5  # behind modes (padded) and four longs
        flags = int.from_bytes(timex.raw[offset : offset + 4], sys.byteorder)
    except (OSError, AttributeError):
        return None
    return None if state < 0 else not flags & _STA_UNSYNC
