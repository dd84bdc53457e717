"""Imports the model libraries once for the learner and the actors, while the launcher reads its configuration and makes
its checks. This module imports nothing that takes time itself: the launcher starts the process before its own imports.

    launcher ── first of all ──> python -m asyncrl.launch.backends.preloading: imports torch and the roles
        │                             │
        └─ role, log, lifeline ─ FD ─>│ forks twice, so that the role is the launcher's child; ── pid ──> launcher
                                      │ the fork runs the role's module as `python -m` would
                                      └ is ended once all roles are forked, or when the configuration needs no forks

The imports of a role take seconds of CPU; the learner and the actors share them here, and the memory. Only the first
start of a role is a fork, and only where that is safe: on Linux, where the launcher can adopt what is forked; without
GPUs, whose drivers do not survive a fork; with the embedded engine, on one thread in each process. A process that has
threads refuses to fork. Otherwise the role is started as any other.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import logging
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from asyncrl.launch.placement.machine import has_driver
from asyncrl.launch.processes import RUN_MARKER, Role, python, threads
from asyncrl.process import lifeline

if TYPE_CHECKING:
    from asyncrl.config import Config

log = logging.getLogger(__name__)

ROLES = ("asyncrl.learner", "asyncrl.actors")
"""Packages whose process is forked."""
BESIDES = ("asyncrl.actors.engines.hf.engine", "transformers.models.auto.modeling_auto")
"""What these import later, when they know their config."""
STARTS_NOTHING = ("--dry-run", "--print", "--help", "--help-all", "-h")
"""Options of `launch` with which no role is started."""
MOST = 1 << 20
"""Bytes of a request: the role's environment is most of it."""
TURN_S = 0.2
"""Seconds between two looks at whether the launcher was interrupted, while a fork waits for the imports."""
_PR_SET_NAME = 15
_ADOPTED_S = 10.0
"""Seconds for the process between a fork and the launcher to end."""


class Preloaded:
    """The launcher's handle of the process that forks roles."""

    def __init__(self, roles: Sequence[str] = ROLES, besides: Sequence[str] = BESIDES) -> None:
        """`roles`: the packages that it can run. `besides`: modules that it imports, too."""
        self._roles, self._left, self._deadline_s = roles, 0, 0.0
        modules = (*(f"{package}.__main__" for package in roles), *besides)
        self.run_id = uuid.uuid4().hex
        """The id of the run that this process and its forks carry in their environment."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(TURN_S)
        self._socket = ours
        self._lifeline: int | None
        reading, self._lifeline = os.pipe()
        with theirs:
            self._process = subprocess.Popen(
                python(f"{__package__}.preloading", str(theirs.fileno()), str(reading), *modules),
                env={**os.environ, "PYTHONUNBUFFERED": "1", **threads(1), RUN_MARKER: self.run_id},
                pass_fds=[theirs.fileno(), reading],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a role that is then started otherwise says the same in its log
                start_new_session=True,
            )
        os.close(reading)

    def expect(self, forks: int, deadline_s: float) -> None:
        """`forks`: after so many the process is ended. `deadline_s`: how long one may take, the imports included."""
        self._left, self._deadline_s = forks, deadline_s

    def fork(
        self, role: Role, environment: Mapping[str, str], output: int, pipe: int, *, interrupted: Callable[[], bool]
    ) -> int | None:
        """The pid of the role's process, a child of this one, which must be a subreaper; None: start it otherwise.
        `output` and `pipe`: the files of its log and of its lifeline. `interrupted`: whether to wait no longer."""
        if self._left <= 0 or role.command[:3] not in map(python, self._roles):
            return None
        request = json.dumps({"name": role.name, "words": role.command[2:], "environment": dict(environment)}).encode()
        try:
            socket.send_fds(self._socket, [request], [output, pipe])
            answer = self._answer(interrupted)
        except OSError as error:
            log.info("%s is not forked: %s", role.name, error)
            answer = b""
        pid: int | None = json.loads(answer)["pid"] if answer else None
        self._left = 0 if pid is None else self._left - 1
        if not self._left:
            self.close()
        return pid

    def _answer(self, interrupted: Callable[[], bool]) -> bytes:
        """The answer to a request; empty: the process has ended. Raises OSError when there is none in time."""
        until = time.monotonic() + self._deadline_s
        while not interrupted():  # a signal's handler only counts, and `recv` goes on after it
            with contextlib.suppress(TimeoutError):
                return self._socket.recv(MOST)
            if time.monotonic() > until:
                raise TimeoutError(f"no answer within {self._deadline_s:g} s")
        raise InterruptedError("the launcher was interrupted")

    def close(self) -> None:
        """Ends the process; its forks live on."""
        self._left = 0
        self._socket.close()
        self._process.kill()
        self._process.wait()
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None


@contextlib.contextmanager
def early(words: Sequence[str]) -> Iterator[Preloaded | None]:
    """The process of a launch with these words, before its configuration is known; None where it cannot be of use."""
    nothing_starts = not words or any(word.partition("=")[0] in STARTS_NOTHING for word in words)
    if nothing_starts or sys.platform != "linux" or has_driver():
        yield None
        return
    with contextlib.closing(Preloaded()) as preloaded:
        yield preloaded


@contextlib.contextmanager
def preloading(config: Config, started: Preloaded | None = None) -> Iterator[Preloaded | None]:
    """A process that forks the learner and the actors, where that is safe; else None. `started`: by `early`."""
    if not forkable(config):
        if started is not None:
            started.close()
        yield None
        return
    preloaded = started or Preloaded()
    preloaded.expect(config.learner.ranks + config.actors.count, config.launch.start_s)
    try:
        yield preloaded
    finally:
        preloaded.close()


def forkable(config: Config) -> bool:
    """Whether the learner and the actors of a run can be forks of one process."""
    return (
        sys.platform == "linux"
        and config.launch.backend == "local"
        and config.actors.engine == "hf"
        and config.actors.threads == config.learner.threads == 1
        and not has_driver()
    )


def serve(fd: int, pipe: int, modules: Sequence[str]) -> None:
    """Imports, then forks a role for each request; returns when the launcher has closed its end, and in a fork when
    the role has ended. `pipe`: the lifeline of this process, which is none of its forks'."""
    launcher = socket.socket(fileno=fd)
    for file in (fd, pipe):
        os.set_inheritable(file, False)
    gc.disable()  # what is imported stays: looking for garbage among it takes a seventh of the time
    for module in modules:
        importlib.import_module(module)
    gc.enable()
    gc.collect()
    gc.freeze()  # a collection would write to every page that the forks share
    while True:
        request, files, _, _ = socket.recv_fds(launcher, MOST, 2)
        if not request:
            return
        if len(os.listdir("/proc/self/task")) > 1 or threading.active_count() > 1:
            launcher.send(json.dumps({"pid": None}).encode())
        elif (pid := _fork_for_launcher()) == 0:
            launcher.close()
            os.close(pipe)
            _become(json.loads(request), *files)
        else:
            launcher.send(json.dumps({"pid": pid}).encode())
        for file in files:
            os.close(file)


def _fork_for_launcher() -> int:
    """0 in the fork, whose parent is the nearest subreaper above this process; its pid in this process."""
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        first = os.getpid()
        if os.fork() == 0:
            os.close(reading)
            until = time.monotonic() + _ADOPTED_S
            while os.getppid() == first and time.monotonic() < until:  # whoever asks for its parent gets the launcher
                time.sleep(0.001)
            os.setsid()  # before the launcher knows its pid: it signals the group of this number
            os.write(writing, str(os.getpid()).encode())
            os.close(writing)
            return 0
        os._exit(0)
    os.waitpid(between, 0)  # its end gives its child to the subreaper
    os.close(writing)
    with os.fdopen(reading) as said:
        return int(said.read())


def _become(request: dict[str, Any], output: int, pipe: int) -> NoReturn:
    """Runs the role's module in this fork, as `python -m` would in a new process."""
    os.environ.clear()
    os.environ.update(request["environment"], **{lifeline.ENVIRONMENT: str(pipe)})
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, request["name"].encode()[:15], 0, 0, 0)
    import numpy as np

    np.random.seed()  # the one that libraries share; Python seeds its own at a fork
    package, *arguments = request["words"]
    sys.argv = [package, *arguments]
    sys.modules.pop(f"{package}.__main__")
    runpy.run_module(package, run_name="__main__", alter_sys=True)
    sys.exit(0)
