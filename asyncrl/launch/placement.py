"""Which roles must share a host, and what each sets aside there. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from asyncrl.config import Config

T = TypeVar("T")


def needs(role: str, config: Config) -> dict[str, float]:
    """What one process of `role` (`actor-0`) sets aside: CPU, GPU, and resources that the cluster's nodes name.

    GPUs of an actor are its tensor-parallel size, unless `launch.gpus` says otherwise.
    """
    cpus = of(config.ray.cpus, role)
    found = {"CPU": 1.0 if cpus is None else cpus}
    gpus = of(config.launch.gpus, role)
    if gpus is None and role.startswith("actor"):
        parallel = config.actors.engine_options.get("tensor_parallel", 1)
        gpus = float(parallel) if parallel > 1 else None
    found["GPU"] = gpus or 0.0
    return {name: amount for name, amount in {**found, **(of(config.ray.resources, role) or {})}.items() if amount}


def of(values: Mapping[str, T], role: str) -> T | None:
    """What is said of this role, else of its kind."""
    return values.get(role, values.get(role.partition("-")[0]))


def together(roles: Iterable[str]) -> list[tuple[str, ...]]:
    """The groups of roles that share a host: the learner's ranks, and what hands their weights on, which reads them
    from shared memory.

    >>> together(["buffer", "weights", "learner", "learner-1", "actor-0", "actor-1"])
    [('buffer',), ('weights', 'learner', 'learner-1'), ('actor-0',), ('actor-1',)]
    """
    groups: dict[str, list[str]] = {}
    for role in roles:
        kind = role.partition("-")[0]
        groups.setdefault("learner" if kind in ("learner", "weights") else role, []).append(role)
    return [tuple(group) for group in groups.values()]
