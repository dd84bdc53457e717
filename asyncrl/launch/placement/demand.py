"""How many GPUs one process of each role wants. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from asyncrl.config import Config
from asyncrl.config.rules.gpus import engine_gpus

T = TypeVar("T")
ON_DEVICE = ("cuda_ipc", "nccl")
"""Values of `weights.channel` that need a GPU."""


@dataclass(frozen=True, slots=True)
class Demand:
    role: str
    gpus: float
    """GPUs of one process; below 1, a share of one; 0: none."""
    named: bool = False
    """Whether `launch.gpus` says so. Otherwise it is the default, and GPUs are shared where there are too few."""

    @property
    def kind(self) -> str:
        return self.role.partition("-")[0]


def demand(role: str, config: Config) -> Demand:
    """The demand of a process: what `launch.gpus` says, else one GPU for a rank of the learner, and for an actor those
    of its engine."""
    gpus = setting(config.launch.gpus, role)
    if gpus is None:
        default = {"learner": 1.0, "actor": float(engine_gpus(config))}
        return Demand(role, default.get(role.partition("-")[0], 0.0))
    return Demand(role, gpus, named=True)


def asks_for_gpus(config: Config) -> bool:
    """Whether the configuration says that the run has GPUs, so that no role may silently compute on a CPU."""
    return (
        any(gpus > 0 for gpus in config.launch.gpus.values())
        or engine_gpus(config) > 1
        or config.weights.channel in ON_DEVICE
    )


def reserved(role: str, config: Config) -> float:
    """GPUs that the process reserves of a Ray cluster. Without any sign that the run has GPUs it reserves none; with
    one, a role that `launch.gpus` does not name reserves its default rather than computing on a CPU."""
    wanted = demand(role, config)
    return wanted.gpus if wanted.named or asks_for_gpus(config) else 0.0


def setting(values: Mapping[str, T], role: str) -> T | None:
    """The value for this role, else for its kind."""
    return values.get(role, values.get(role.partition("-")[0]))
