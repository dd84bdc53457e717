"""What ranks tell each other beside tensors: JSON, as a tensor of bytes. torch's own exchanges of objects unpickle what
arrives, and whoever alters that on its way runs code on a rank."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def tell(content: Any, group: dist.ProcessGroup) -> None:
    """Called by rank 0, while the other ranks of `group` call `told`."""
    data = _bytes(content)
    dist.broadcast(torch.tensor([len(data)]), 0, group=group)
    dist.broadcast(data, 0, group=group)


def told(group: dist.ProcessGroup) -> Any:
    """What rank 0 tells."""
    size = torch.zeros(1, dtype=torch.long)
    dist.broadcast(size, 0, group=group)
    data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, 0, group=group)
    return _content(data)


def exchanged(mine: Any, group: dist.ProcessGroup, device: torch.device | None = None) -> list[Any]:
    """What each rank of `group` tells, in their order. `device`: on which tensors are sent, the CPU if None."""
    data = _bytes(mine).to(device)
    own = torch.tensor([len(data)], device=device)
    sizes = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(sizes, own, group=group)
    padded = data.new_zeros(int(max(sizes)))
    padded[: len(data)] = data
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded, group=group)
    return [_content(each[: int(size)]) for each, size in zip(received, sizes, strict=True)]


def _bytes(content: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)


def _content(data: Tensor) -> Any:
    return json.loads(bytes(data.cpu().numpy()))
