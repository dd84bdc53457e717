"""What each process of a run needs of a node, which of them share one, and how they talk there. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from asyncrl.config import Config
from asyncrl.config.rules.ranks import nodes_of_ranks
from asyncrl.config.teacher import scorer_names
from asyncrl.launch.placement.demand import reserved, setting
from asyncrl.weights.channels import server


def interfaces(config: Config) -> dict[str, str]:
    """Environment variables that bind the collectives of the learner's ranks to the loopback interface where the ranks
    share a host, whose name may resolve to any address. NCCL chooses by itself where it also sends weights to engines,
    which may be on other hosts: the address that they are given must not be this host's loopback. On several nodes each
    rank sets them when it knows the way to rank 0 (asyncrl/learner/ranks/interface.py)."""
    if config.learner.ranks == 1 or nodes_of_ranks(config) > 1:
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


def sharing_a_host(roles: Iterable[str], ranks_per_node: int | None = None) -> list[tuple[str, ...]]:
    """The groups of roles that share a host: blocks of `ranks_per_node` ranks of the learner (None: all of them), with
    rank 0 the weights server, which reads the weights from shared memory; every other role is a group of its own.

    >>> roles = ["buffer", "weights", "learner", "learner-1", "learner-2", "actor-0", "actor-1"]
    >>> sharing_a_host(roles)
    [('buffer',), ('weights', 'learner', 'learner-1', 'learner-2'), ('actor-0',), ('actor-1',)]
    >>> sharing_a_host(roles, 2)
    [('buffer',), ('weights', 'learner', 'learner-1'), ('learner-2',), ('actor-0',), ('actor-1',)]
    """
    groups: dict[str, list[str]] = {}
    for role in roles:
        kind, _, number = role.partition("-")
        if kind in ("learner", "weights"):
            block = int(number or 0) // ranks_per_node if ranks_per_node else 0
            groups.setdefault(f"learner {block}", []).append(role)
        else:
            groups[role] = [role]
    return [tuple(group) for group in groups.values()]
