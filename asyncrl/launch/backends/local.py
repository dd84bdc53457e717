"""What starts the processes of a run, chosen by name (`launch.backend`); the default: subprocesses of the launcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from asyncrl.config import Config
from asyncrl.launch.placement.visible import VisibleGpus
from asyncrl.launch.processes import Fork, Process, Role
from asyncrl.plugins import resolve
from asyncrl.run_folder import RunFolder


class RoleProcess(Protocol):
    """The process of a role, on any host."""

    role: Role
    log: Path
    killed_for: str
    """Why it was killed, or how it ended where its log cannot tell."""

    @property
    def started(self) -> float:
        """Start time by `time.monotonic`; infinite while a dispensable process waits for a host."""
        ...

    @property
    def identity(self) -> tuple[int, float] | None:
        """pid and start time; None until both are known."""
        ...

    @property
    def local(self) -> bool:
        """Whether it runs on this host."""
        ...

    @property
    def lost(self) -> bool:
        """Whether it ended because its host was lost."""
        ...

    def ended(self) -> int | None:
        """None while it runs; then its exit code, negative for a signal, and nothing of its group is left."""
        ...

    def stop(self) -> None:
        """Asks it to stop in order."""
        ...

    def kill(self, why: str) -> None:
        """Kills its process group; `ended` tells when that is done."""
        ...


class Backend(Protocol):
    def start(self, role: Role, *, again: bool = False) -> RoleProcess:
        """Raises OSError or RunError when it cannot be started."""
        ...

    def forget(self, name: str) -> None:
        """Releases what an ended role had reserved, if it is not started again."""
        ...

    def waits(self) -> str:
        """Describes the roles that wait for a host and the resources they need; empty: there are none."""
        ...

    def close(self) -> None:
        """Cleans up on every host after all processes have ended."""
        ...


class Local:
    """Starts roles as subprocesses of this process, each of which sees its own GPUs alone."""

    def __init__(self, run: RunFolder, config: Config, fork: Fork | None = None) -> None:
        """`fork` starts those roles that it can. Raises ConfigError when this machine has not the GPUs that
        `launch.gpus` asks for."""
        self._run, self._fork = run, fork
        self._gpus = VisibleGpus(config)

    def start(self, role: Role, *, again: bool = False) -> Process:
        shown = replace(role, environment={**role.environment, **self._gpus.environment(role.name)})
        return Process(shown, self._run.id, self._run.log(role.name), again=again, fork=self._fork)

    def forget(self, name: str) -> None:
        self._gpus.forget(name)

    def waits(self) -> str:
        return ""

    def close(self) -> None:
        pass


BACKENDS = {"local": "asyncrl.launch.backends.local:Local", "ray": "asyncrl.launch.backends.ray:Ray"}


def backend(run: RunFolder, config: Config) -> Backend:
    """Raises RunError when it has no connection to the cluster."""
    made: Callable[[RunFolder, Config], Backend] = resolve(BACKENDS[config.launch.backend], None, "launch.backend")
    return made(run, config)
