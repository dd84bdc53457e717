"""How faults of some kinds are brought about: what a job needs for them, and their beginning and end."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.chaos.plan import Fault
from asyncrl.config import Config
from asyncrl.run_folder import RunFolder


class Means:
    """Made before anything starts: raises ConfigError, naming the kind, where this machine or this config has not what
    it needs."""

    def changed(self, config: Config) -> Config:
        """The config of a job that can be disturbed so."""
        return config

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that the job's processes need."""
        return {}

    def open(self, run: RunFolder) -> None:
        """Before the launch."""

    def ready(self, fault: Fault) -> bool:
        """Whether what it befalls is there now; until then it is waited for."""
        return True

    def begin(self, fault: Fault) -> str:
        """Gives what is to be said of it besides the plan. Raises RunError when it cannot be done after all."""
        return ""

    def end(self, fault: Fault) -> None:
        """Of a fault that passes; also when the run ends before it."""

    def close(self) -> None:
        """After the last process of the job."""
