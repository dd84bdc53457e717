"""Shows each process of `launch.backend: local` its GPUs and no others, by CUDA_VISIBLE_DEVICES.

NCCL and CUDA IPC reach GPUs that a process does not see, so nothing is lost by it.
"""

from __future__ import annotations

import os

from asyncrl.config import Config
from asyncrl.launch.placement.demand import demand
from asyncrl.launch.placement.machine import gpus_here
from asyncrl.launch.placement.plan import check_asked, pool_of
from asyncrl.launch.placement.resources import role_names
from asyncrl.process.gpus import GIVEN, SHARED

VISIBLE = "CUDA_VISIBLE_DEVICES"


class VisibleGpus:
    """The GPUs of the run's processes. An actor that joins later gets free ones, or shares; one that left gives its
    GPUs back."""

    def __init__(self, config: Config) -> None:
        """Raises ConfigError for what this machine has no room for."""
        self._config = config
        self._count = gpus_here()
        check_asked(config, self._count)
        self._names = _names(self._count, os.environ.get(VISIBLE))
        self._pool = pool_of(config, self._count)
        for name in role_names(config):
            self._pool.take(demand(name, config))

    def environment(self, role: str) -> dict[str, str]:
        """Environment variables of its process; on a machine without GPUs none."""
        if not self._count:
            return {}
        gpus = self._pool.take(demand(role, self._config))
        shared = {SHARED: "1"} if self._pool.shared(role) else {}
        return {VISIBLE: ",".join(self._names[gpu] for gpu in gpus), GIVEN: str(len(gpus)), **shared}

    def forget(self, role: str) -> None:
        self._pool.give(role)


def _names(count: int, visible: str | None) -> list[str]:
    """What names each GPU that this process sees: an entry of its own CUDA_VISIBLE_DEVICES, which may be a UUID.

    >>> _names(2, None), _names(2, "4,GPU-7f")
    (['0', '1'], ['4', 'GPU-7f'])
    """
    return [entry.strip() for entry in visible.split(",")][:count] if visible else [str(gpu) for gpu in range(count)]
