"""Joins a process group as SGLang's servers do, and writes what is broadcast there to files: `FOLDER JSON`."""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous

TIMEOUT = timedelta(seconds=60)


def main() -> None:
    folder, asked = sys.argv[1], json.loads(sys.argv[2])
    rank, size, name = asked["rank_offset"], asked["world_size"], asked["group_name"]
    address = f"tcp://{asked['master_address']}:{asked['master_port']}"
    store, _, _ = next(rendezvous(address, rank, size, timeout=TIMEOUT))
    group, _ = _new_process_group_helper(
        size, rank, [], Backend(asked["backend"]), PrefixStore(name, store), group_name=name, timeout=TIMEOUT
    )
    _world.pg_group_ranks[group] = {i: i for i in range(size)}
    for number, line in enumerate(sys.stdin):
        body = json.loads(line)
        found = {}
        for tensor, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            found[tensor] = torch.empty(shape, dtype=getattr(torch, dtype))
            dist.broadcast(found[tensor], src=0, group=group)
        path = f"{folder}/{number}.safetensors"
        save_file(found, path)
        print(path, flush=True)


if __name__ == "__main__":
    main()
