"""What injects the faults of one kind or several: its requirements, and the beginning and end of each fault."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.chaos.plan import Fault
from asyncrl.config import Config
from asyncrl.run_folder import RunFolder


class Injector:
    """Created before anything starts. The constructor raises ConfigError, naming the kind of fault, where this machine
    or this config lacks what it needs."""

    def changed(self, config: Config) -> Config:
        """The config of a job into which these faults can be injected."""
        return config

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables for the job's processes."""
        return {}

    def open(self, run: RunFolder) -> None:
        """Called before the launch."""

    def ready(self, fault: Fault) -> bool:
        """Whether the target of the fault is there now; the job waits for it."""
        return True

    def begin(self, fault: Fault) -> str:
        """Injects the fault; gives details for the log. Raises RunError when that is impossible after all."""
        return ""

    def end(self, fault: Fault) -> None:
        """Ends a fault that passes, also when the run ends first."""

    def close(self) -> None:
        """Called after the last process of the job has ended."""
