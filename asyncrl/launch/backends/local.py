"""Who starts the processes of a run, by name (`launch.backend`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from asyncrl.config import Config
from asyncrl.launch.processes import Process, Role
from asyncrl.plugins import resolve
from asyncrl.run_folder import RunFolder


class RoleProcess(Protocol):
    """A role's process, wherever it runs."""

    role: Role
    log: Path
    killed_for: str
    """Why it was killed, or how it ended when its log cannot say so."""

    @property
    def started(self) -> float:
        """By `time.monotonic`; infinite while it has no place to run and the run can do without it."""
        ...

    @property
    def identity(self) -> tuple[int, float] | None:
        """pid and start time; None until both are known."""
        ...

    @property
    def here(self) -> bool:
        """It runs on this host."""
        ...

    @property
    def lost(self) -> bool:
        """It ended because its host is gone."""
        ...

    def ended(self) -> int | None:
        """None while it runs; then its exit code, negative for a signal, and nothing of its group is left."""
        ...

    def stop(self) -> None:
        """Asks it to stop in order."""
        ...

    def kill(self, why: str) -> None:
        """`ended` says when it is done."""
        ...


class Backend(Protocol):
    def start(self, role: Role, *, again: bool = False) -> RoleProcess:
        """Raises OSError or RunError when it cannot be started."""
        ...

    def forget(self, name: str) -> None:
        """This role has ended and is not started again."""
        ...

    def waits(self) -> str:
        """What has no place to run, and what it would need; empty: everything runs."""
        ...

    def close(self) -> None:
        """Every process has ended: leaves nothing behind on any host."""
        ...


class Local:
    """Subprocesses of this one."""

    def __init__(self, run: RunFolder, config: Config) -> None:
        self._run = run

    def start(self, role: Role, *, again: bool = False) -> Process:
        return Process(role, self._run.id, self._run.log(role.name), again=again)

    def forget(self, name: str) -> None:
        pass

    def waits(self) -> str:
        return ""

    def close(self) -> None:
        pass


BACKENDS = {"local": "asyncrl.launch.backends.local:Local", "ray": "asyncrl.launch.backends.ray:Ray"}


def backend(run: RunFolder, config: Config) -> Backend:
    """Raises RunError when it has no connection to the cluster."""
    made: Callable[[RunFolder, Config], Backend] = resolve(BACKENDS[config.launch.backend], None, "launch.backend")
    return made(run, config)
