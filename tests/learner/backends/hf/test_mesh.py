"""The groups of ranks under `learner.shard: node`."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from asyncrl.learner.backends.hf.mesh import mesh
from tests.learner.kept_ranks import on_kept_ranks
from tests.learner.tiny import tiny_config


def groups() -> dict[str, tuple[list[int], timedelta]]:
    """The ranks of each group of this rank, and how long an exchange in it may take."""
    config = tiny_config(backend="fsdp2", ranks=4, ranks_per_node=2, shard="node", collective_s=37.0)
    made = mesh(config, "cpu", 4)
    found = {}
    for name in made.mesh_dim_names or ():
        group = made.get_group(name)
        wait = group._get_backend(torch.device("cpu")).options._timeout
        found[name] = (dist.get_process_group_ranks(group), wait)
    return found


def test_an_exchange_among_the_ranks_of_a_node_or_among_nodes_has_the_configured_time() -> None:
    wait = timedelta(seconds=37)
    for rank, found in enumerate(on_kept_ranks(4, groups)):
        first, node = rank % 2, rank // 2 * 2
        assert found == {"replicate": ([first, first + 2], wait), "shard": ([node, node + 1], wait)}
