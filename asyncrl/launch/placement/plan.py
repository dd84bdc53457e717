"""The table of a run's placement: role, node, GPU, the index by which the process sees it, network interface. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from asyncrl.config import Config
from asyncrl.config.rules.ranks import nodes_of_ranks, ranks_per_node
from asyncrl.errors import ConfigError
from asyncrl.launch.placement.demand import Demand, demand, reserved
from asyncrl.launch.placement.pool import GpuPool
from asyncrl.launch.placement.resources import interfaces, role_names, sharing_a_host

TO_RANK_0 = "the one to rank 0"
"""Interface of ranks on several nodes, which each of them finds out."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The place of one process."""

    role: str
    node: str
    gpus: tuple[int, ...] = ()
    """Numbers of its GPUs on the node, among those that the launcher, or Ray, sees there."""
    shared: bool = False
    """Whether another process uses one of them too."""
    interface: str = ""
    """Network interface of its collectives; empty: it has none, or chooses."""
    wanted: float = 0.0
    """GPUs, where the node is not known yet."""
    memory: str = ""
    """Planned memory of each of its GPUs."""

    @property
    def index(self) -> str:
        """The index by which the process sees them: it sees no others."""
        return ",".join(map(str, range(len(self.gpus)))) if self.gpus else "-"


def on_this_machine(config: Config, gpus: int) -> list[Placed]:
    """The placement of `launch.backend: local`. Raises ConfigError for what does not fit."""
    pool = pool_of(config, gpus)
    names = role_names(config)
    placed = [Placed(name, "this machine", pool.take(demand(name, config))) for name in names]
    return [replace(p, shared=pool.shared(p.role), interface=_interface(config, p.role)) for p in placed]


def on_nodes(config: Config, nodes: Mapping[str, int]) -> list[Placed]:
    """The placement that Ray finds on empty nodes, given by their numbers of GPUs: roles that share a host go to the
    first one with room. Raises ConfigError when there is none. Without nodes, what each role reserves."""
    demands = {name: _of_ray(name, config) for name in role_names(config)}
    if not nodes:
        return [
            Placed(name, "chosen by Ray", wanted=d.gpus, interface=_interface(config, name))
            for name, d in demands.items()
        ]
    pools = {node: GpuPool(gpus) for node, gpus in nodes.items()}
    placed = {}
    for group in sharing_a_host(demands, ranks_per_node(config)):
        for p in _first_with_room(pools, [demands[name] for name in group]):
            placed[p.role] = p
    return [
        replace(placed[name], shared=pools[placed[name].node].shared(name), interface=_interface(config, name))
        for name in demands
    ]


def pool_of(config: Config, gpus: int) -> GpuPool:
    channel = config.weights.channel
    return GpuPool(gpus, together=channel == "cuda_ipc", apart=channel == "nccl")


def check_asked(config: Config, gpus: int) -> None:
    """Raises ConfigError when the configuration gives roles GPUs and this machine has none that torch sees."""
    asked = {role: n for role, n in config.launch.gpus.items() if n > 0}
    if config.launch.backend == "local" and asked and not gpus:
        role, n = next(iter(asked.items()))
        raise ConfigError(
            f"launch.gpus.{role} is {n:g}, and torch sees no GPU on this machine: install the driver and a CUDA build "
            "of torch, or leave launch.gpus out to compute on the CPU."
        )


def fewest(config: Config) -> int:
    """The fewest GPUs of one machine on which no two processes share one, or those that `cuda_ipc` shares."""
    if config.weights.channel == "cuda_ipc":
        return 1
    names = role_names(config)
    return max(1, -int(-sum(demand(name, config).gpus for name in names) // 1))


def unused(config: Config, gpus: int) -> str:
    """A sentence about GPUs that nothing uses, with the fields that would use them; empty: there are none."""
    taken = {gpu for p in on_this_machine(config, gpus) for gpu in p.gpus}
    idle = [gpu for gpu in range(gpus) if gpu not in taken]
    if not idle:
        return ""
    if config.weights.channel == "cuda_ipc":
        return f"GPUs {_span(idle)} are not used: weights.channel cuda_ipc is for one GPU, nccl for several."
    each = demand("actor-0", config).gpus
    more = int(len(idle) // each) if each >= 1 else 0
    remedy = f"actors.count {config.actors.count + more}, or " if more else ""
    return f"GPUs {_span(idle)} are not used: {remedy}learner.ranks (learner.backend fsdp2) would use them."


def lines(placed: Sequence[Placed]) -> list[str]:
    """The table as text."""
    head = ("role", "node", "GPU", "index", "interface", "planned memory")
    rows = [head, *((p.role, p.node, _gpus(p), p.index, p.interface or "-", p.memory or "-") for p in placed)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _gpus(p: Placed) -> str:
    if not p.gpus:
        return f"{p.wanted:g} of a node" if p.wanted else "none"
    return ",".join(map(str, p.gpus)) + (" (shared)" if p.shared else "")


def _span(gpus: Sequence[int]) -> str:
    return ", ".join(map(str, gpus))


def _interface(config: Config, role: str) -> str:
    if not role.startswith("learner"):
        return ""
    if nodes_of_ranks(config) > 1:
        return TO_RANK_0
    named = interfaces(config)
    gloo, nccl = named.get("GLOO_SOCKET_IFNAME", ""), named.get("NCCL_SOCKET_IFNAME", "")
    if gloo == nccl:
        return gloo
    return f"gloo {gloo}, NCCL chooses"


def _of_ray(name: str, config: Config) -> Demand:
    return Demand(name, reserved(name, config), named=True)


def _first_with_room(pools: Mapping[str, GpuPool], demands: Sequence[Demand]) -> list[Placed]:
    for node, pool in pools.items():
        try:
            return [Placed(d.role, node, pool.take(d), wanted=d.gpus) for d in demands]
        except ConfigError:
            for d in demands:
                pool.give(d.role)
    wanted = " + ".join(f"{d.role} {d.gpus:g}" for d in demands)
    raise ConfigError(
        f"no node has the GPUs that {wanted} need together, which share a host: add a larger node, or lower "
        "launch.ranks_per_node, learner.ranks or launch.gpus."
    )
