"""Which ranks shard a parameter together, and which hold copies of it (`learner.shard`)."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from asyncrl.config import Config
from asyncrl.config.rules.ranks import nodes_of_ranks, ranks_per_node


def copies(config: Config) -> int:
    """Copies of the sharded model: one for each node under `learner.shard: node` (HSDP), else one."""
    return nodes_of_ranks(config) if config.learner.shard == "node" else 1


def mesh(config: Config, device: str, ranks: int) -> DeviceMesh:
    """The mesh of the ranks: [ranks], or [copies, ranks that share one]."""
    if (n := copies(config)) == 1:
        return init_device_mesh(device, (ranks,))
    each = torch.arange(ranks).view(n, ranks // n)
    # torch's own groups of a mesh of two dimensions do not take over the time of the ranks' first group.
    wait = timedelta(seconds=config.learner.collective_s)
    groups = [dist.new_subgroups_by_enumeration(among.tolist(), timeout=wait)[0] for among in (each.T, each)]  # type: ignore[no-untyped-call]
    return DeviceMesh.from_group(groups, device, each, mesh_dim_names=("replicate", "shard"))


def sharers(config: Config, everyone: dist.ProcessGroup, wait: timedelta) -> dist.ProcessGroup:
    """Those of `everyone` that hold shards of the same copy as this rank; collective."""
    if copies(config) == 1:
        return everyone
    mine: dist.ProcessGroup
    mine, _ = dist.new_subgroups(ranks_per_node(config), backend="gloo", timeout=wait)  # type: ignore[no-untyped-call]
    return mine
