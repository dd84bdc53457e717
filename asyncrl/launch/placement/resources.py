"""What each process of a run needs of a node, which of them share one, and how they talk there. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from asyncrl.config import Config
from asyncrl.config.teacher import scorer_names
from asyncrl.launch.placement.demand import reserved, setting
from asyncrl.weights.channels import server


def interfaces(config: Config) -> dict[str, str]:
    """Environment variables that bind the collectives of the learner's ranks to the loopback interface: the ranks share
    a host, whose name may resolve to any address. NCCL chooses by itself where it also sends weights to engines, which
    may be on other hosts: the address that they are given must not be this host's loopback."""
    if config.learner.ranks == 1:
        return {}
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    gloo = {"GLOO_SOCKET_IFNAME": loopback}
    of_weights = config.weights.channel not in ("shm", "zmq", "cuda_ipc")
    return gloo if of_weights else gloo | {"NCCL_SOCKET_IFNAME": loopback}


def role_names(config: Config) -> list[str]:
    """The names of the roles, in the order in which they start."""
    ranks = ["learner", *(f"learner-{rank}" for rank in range(1, config.learner.ranks))]
    actors = [f"actor-{i}" for i in range(config.actors.count)]
    return [
        "buffer",
        *(["weights"] if server(config) is not None else []),
        *ranks,
        *scorer_names(config),
        *actors,
    ]


def resources_of(role: str, config: Config) -> dict[str, float]:
    """The resources that the process of `role` (`actor-0`) reserves: CPU, GPU, and those that the cluster's nodes name.

    Of GPUs, what `launch.gpus` says, else its default (placement/demand.py).
    """
    cpus = setting(config.ray.cpus, role)
    resources = {"CPU": 1.0 if cpus is None else cpus, "GPU": reserved(role, config)}
    return {
        name: amount for name, amount in {**resources, **(setting(config.ray.resources, role) or {})}.items() if amount
    }


def sharing_a_host(roles: Iterable[str]) -> list[tuple[str, ...]]:
    """The groups of roles that share a host: the learner's ranks and the weights server, which reads the weights from
    shared memory; every other role is a group of its own.

    >>> sharing_a_host(["buffer", "weights", "learner", "learner-1", "actor-0", "actor-1"])
    [('buffer',), ('weights', 'learner', 'learner-1'), ('actor-0',), ('actor-1',)]
    """
    groups: dict[str, list[str]] = {}
    for role in roles:
        kind = role.partition("-")[0]
        groups.setdefault("learner" if kind in ("learner", "weights") else role, []).append(role)
    return [tuple(group) for group in groups.values()]
