"""The processes of a run: the command and the resources of each, and which of them share a host. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from asyncrl.config import Config
from asyncrl.launch.processes import Role, python
from asyncrl.run_folder import RunFolder
from asyncrl.weights.channels import channel

T = TypeVar("T")


def roles(run: RunFolder, config: Config, *, resume: bool) -> list[Role]:
    """The roles of a run, in the order in which they start."""
    folder = str(run.path)
    started = [
        Role("buffer", python("asyncrl.buffer", folder), environment=_threads(1)),
        *(_learner(folder, config, rank, resume=resume) for rank in range(config.learner.ranks)),
        *(actor(run, config, f"actor-{i}") for i in range(config.actors.count)),
    ]
    if (server := channel(config).server) is not None:
        started.insert(1, Role("weights", python(server, folder), environment=_threads(1)))
    return [replace(role, cpus=setting(config.launch.cpus, role.name) or ()) for role in started]


def actor(run: RunFolder, config: Config, name: str) -> Role:
    command = python("asyncrl.actors", str(run.path), "--name", name)
    return Role(name, command, (), _threads(config.actors.threads), setting(config.launch.cpus, name) or ())


def _learner(folder: str, config: Config, rank: int, *, resume: bool) -> Role:
    first = python("asyncrl.learner", folder, *(("--rank", str(rank)) if rank else ()))
    again = (*first, "--resume")
    begin = again if resume else first
    environment = _threads(config.learner.threads)
    if config.learner.ranks > 1:  # they share a host, whose name may resolve to any address
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        environment |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    name, leader = (f"learner-{rank}", "learner") if rank else ("learner", "")
    return Role(name, begin, again, environment, leader=leader)


def _threads(n: int) -> dict[str, str]:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    # Without these, progress bars would fill the logs.
    return {"TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1", **dict.fromkeys(names, str(n))}


def resources_of(role: str, config: Config) -> dict[str, float]:
    """The resources that the process of `role` (`actor-0`) reserves: CPU, GPU, and those that the cluster's nodes name.

    An actor takes as many GPUs as its tensor-parallel size, unless `launch.gpus` says otherwise.
    """
    cpus = setting(config.ray.cpus, role)
    resources = {"CPU": 1.0 if cpus is None else cpus}
    gpus = setting(config.launch.gpus, role)
    if gpus is None and role.startswith("actor"):
        parallel = config.actors.engine_options.get("tensor_parallel", 1)
        gpus = float(parallel) if parallel > 1 else None
    resources["GPU"] = gpus or 0.0
    return {
        name: amount for name, amount in {**resources, **(setting(config.ray.resources, role) or {})}.items() if amount
    }


def setting(values: Mapping[str, T], role: str) -> T | None:
    """The value for this role, else for its kind."""
    return values.get(role, values.get(role.partition("-")[0]))


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
