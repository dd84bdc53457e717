"""Rules about the learner's ranks: how many there are, and which of them share a node."""

from __future__ import annotations

from asyncrl.config.tree import Tree

NODE_GPUS = 8
"""GPUs of a node, where nothing says otherwise."""


def ranks_per_node(c: Tree) -> int:
    """Ranks 0 to this number less 1 share a node, and so does each further block of that many."""
    ranks, given = c.learner.ranks, c.launch.ranks_per_node
    if c.launch.backend == "local":
        return ranks
    if given is not None:
        return min(given, ranks)
    return _up(ranks, _up(ranks, NODE_GPUS))


def nodes_of_ranks(c: Tree) -> int:
    """The number of blocks of ranks that share a node. Above 1 the ranks meet over tcp, also where two blocks find room
    on one node."""
    return _up(c.learner.ranks, ranks_per_node(c))


def of_ranks(c: Tree) -> list[str]:
    problems = []
    ranks, given, each = c.learner.ranks, c.launch.ranks_per_node, ranks_per_node(c)
    if ranks > 1 and c.learner.backend == "torch":
        problems.append(
            f"learner.ranks is {ranks} but learner.backend torch is one process: use learner.backend fsdp2 or megatron."
        )
    if given is not None and given < ranks and c.launch.backend == "local":
        problems.append(
            f"launch.ranks_per_node is {given} and learner.ranks {ranks}, which takes {_up(ranks, given)} nodes, and "
            "launch.backend local is one machine: use launch.backend ray, or leave launch.ranks_per_node out."
        )
    if c.learner.shard == "node" and c.learner.backend != "fsdp2":
        problems.append(
            f"learner.shard is node but learner.backend {c.learner.backend} does not read it: use learner.backend "
            "fsdp2, or learner.shard all."
        )
    elif c.learner.shard == "node" and ranks % each:
        problems.append(
            f"learner.shard is node and learner.ranks {ranks}, of which {each} share a node (launch.ranks_per_node): "
            f"every node needs as many; use {ranks - ranks % each} or {ranks + each - ranks % each} ranks, or "
            "learner.shard all."
        )
    return problems


def _up(n: int, each: int) -> int:
    return -(-n // each)
