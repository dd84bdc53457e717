"""Starts one process of a run; finds and ends all of them, grandchildren included.

A process leads a session of its own, carries the run's id in its environment, and holds the reading end of a pipe
(process/lifeline.py) whose writing end only the launcher has.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from asyncrl.process import lifeline

RUN_MARKER = "ASYNCRL_RUN"
ROLE_MARKER = "ASYNCRL_ROLE"
HOSTED_MARKER = "ASYNCRL_HOSTED"
"""Under Ray: the worker that started the process."""
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Role:
    """A process to start."""

    name: str
    """`buffer`, `learner`, `actor-0`: the part before the dash is its kind."""
    command: tuple[str, ...]
    again: tuple[str, ...] = ()
    """The command of a restart; empty: the same."""
    environment: Mapping[str, str] = field(default_factory=dict)
    cpus: tuple[int, ...] = ()
    """Cores that it may use; empty: all."""
    leader: str = ""
    """The role that this one follows, if any: when one of them dies, the leader and all its followers are restarted."""

    @property
    def kind(self) -> str:
        return self.name.partition("-")[0]


Fork = Callable[[Role, Mapping[str, str], int, int], int | None]
"""Starts a role as a child of this process, with its environment, and the files of its log and lifeline; gives its pid,
or None."""


def python(module: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module, *arguments)


def threads(n: int) -> dict[str, str]:
    """Environment of a role that computes on `n` threads."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    # Without these, progress bars would fill the logs.
    return {"TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1", **dict.fromkeys(names, str(n))}


class Process:
    """A started role."""

    def __init__(self, role: Role, run_id: str, log: Path, *, again: bool = False, fork: Fork | None = None) -> None:
        """`fork` starts it, where it can; None: it is a new process. Raises OSError when it cannot be started."""
        self.role = role
        self.log = log
        reading, self._lifeline = os.pipe()
        markers = {RUN_MARKER: run_id, ROLE_MARKER: role.name, lifeline.ENVIRONMENT: str(reading)}
        try:
            with log.open("ab") as output:
                environment = {**os.environ, "PYTHONUNBUFFERED": "1", **role.environment, **markers}
                pid = fork(role, environment, output.fileno(), reading) if fork and not again else None
                self._popen = None
                if pid is None:
                    self._popen = subprocess.Popen(
                        (again and role.again) or role.command,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        pass_fds=[reading],
                        start_new_session=True,
                    )
                    pid = self._popen.pid
        except OSError:
            os.close(self._lifeline)
            raise
        finally:
            os.close(reading)
        self.pid = pid
        self._code: int | None = None
        self.identity = (self.pid, psutil.Process(self.pid).create_time())
        """The pid and the start time that the system reports, which together identify the process for good."""
        self.local, self.lost = True, False
        if role.cpus and sys.platform == "linux":
            with contextlib.suppress(ProcessLookupError):  # it has ended already: `ended` tells how
                os.sched_setaffinity(self.pid, role.cpus)
        self.started = time.monotonic()
        self.killed_for = ""
        """Why the launcher killed it."""

    def ended(self) -> int | None:
        """None while it runs; then its exit code, negative for a signal, and nothing of its group is left."""
        if self._code is None:
            # WNOWAIT does not reap: until then the number of the group cannot be reused.
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            self._kill_group()
            self._code = self._reap()
            os.close(self._lifeline)
        return self._code

    def _reap(self) -> int:
        if self._popen is not None:
            return self._popen.wait()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def stop(self) -> None:
        """Asks it to stop in order."""
        if self.ended() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self, why: str) -> None:
        """Kills its process group; `ended` tells when that is done."""
        if self.ended() is None:
            self.killed_for = why
            self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM when only zombies are left
            os.killpg(self.pid, signal.SIGKILL)


def adopt_orphans() -> None:
    """Makes descendants whose parent dies children of this process instead of init's, so that none is lost."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(known: Iterable[int]) -> None:
    """Reaps adopted children that have ended; the `known` pids are reaped by their owners."""
    others = set(known)
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            if child.pid not in others and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def of_run(run_id: str) -> list[psutil.Process]:
    """Every process that carries the run's id in its environment, except this one and zombies."""
    return marked(RUN_MARKER, run_id)


def marked(name: str, value: str) -> list[psutil.Process]:
    """Every process in whose environment `name` is `value`, except this one and zombies."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if (
                process.pid != os.getpid()
                and process.environ().get(name) == value
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                processes.append(process)
    return processes


def alive(pid: int, created: float) -> bool:
    """Whether the process that started at `created` under this pid still runs."""
    try:
        process = psutil.Process(pid)
        # psutil derives the start time from the boot time, which the system clock shifts a little.
        return abs(process.create_time() - created) < 2.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_all(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def role_of(process: psutil.Process) -> str:
    """The role, as in `actor-0`; for a grandchild followed by its command, as in `actor-0: sandbox`. Of a forked role
    (backends/preloaded.py), and of what it forks, the kernel shows the environment of the process that was forked,
    which has no role: then the process's name, which is the first 15 characters of the role's name."""
    try:
        role = process.environ().get(ROLE_MARKER, "")
        if not role:
            return process.name()
        return role if process.pid == os.getsid(process.pid) else f"{role}: {process.name()}"
    except (psutil.Error, OSError):
        return "ended meanwhile"


def this_process() -> list[float]:
    """[pid, start time], as run.json holds them."""
    return [os.getpid(), psutil.Process().create_time()]
