"""Gathers sharded weights at rank 0, many tensors in one collective, since training stands still meanwhile.

    a rank's rows of each weight ─> adapters added ─> published dtype ─> laid end to end, up to BUCKET_BYTES
                                                                                     │ one gather
                                                     whole tensors, in order <── at rank 0

They are converted before they are sent: bfloat16 takes half the bytes of the float32 that is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from asyncrl.learner.backends.hf.lora import Weight

BUCKET_BYTES = 64 << 20
"""Most bytes of whole tensors in one collective; a larger tensor has one of its own."""


def gathered(weights: Sequence[Weight], device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every weight with its adapter, whole and in order, on `device`; floating ones in `dtype`. All ranks call it, and
    rank 0 alone is given them. Where ranks are replicas of others, the first replica sends."""
    holders = _Holders.of(weights)
    if not holders.send:
        return
    adapters = _whole_adapters(weights, holders, device)
    sizes = [prod(w.base.shape) * dtype.itemsize for w in weights]
    for begin, end in buckets(sizes, BUCKET_BYTES):
        some = weights[begin:end]
        sharded = [w for w in some if isinstance(w.base, DTensor)]
        rows = (_rows_of(w, adapters).merged(lambda x: x.to(device)) for w in sharded)
        whole = iter(_whole(rows, [w.base.shape for w in sharded], holders, device, dtype))
        if holders.index == 0:
            for w in some:
                yield w.name, next(whole) if isinstance(w.base, DTensor) else _plain(w.base, device, dtype)


def buckets(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Cuts a sequence into runs whose sizes add up to at most `limit`, or of one alone.

    >>> list(buckets([3, 4, 2, 9, 1], 7))
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    """
    begin, total = 0, 0
    for at, size in enumerate(sizes):
        if at > begin and total + size > limit:
            yield begin, at
            begin, total = at, 0
        total += size
    if begin < len(sizes):
        yield begin, len(sizes)


@dataclass(frozen=True, slots=True)
class _Holders:
    """The ranks that together hold the rows of every weight."""

    group: dist.ProcessGroup
    size: int
    index: int
    """Of this rank among them"""
    send: bool
    """Whether they are those that rank 0 is one of"""

    @classmethod
    def of(cls, weights: Sequence[Weight]) -> _Holders:
        sharded: list[tuple[str, Any]] = [(w.name, w.base) for w in weights if isinstance(w.base, DTensor)]
        mesh, placements = sharded[0][1].device_mesh, sharded[0][1].placements
        for name, shards in sharded:
            if not shards.is_floating_point() or shards.placements != placements:
                raise ValueError(f"{name} is {shards.dtype}, sharded as {shards.placements}: it cannot be gathered")
        across = placements.index(Shard(0))
        where = mesh.get_coordinate()
        first = all(x == 0 for dim, x in enumerate(where) if dim != across)
        return cls(mesh.get_group(across), mesh.size(across), mesh.get_local_rank(across), first)

    def gather(self, mine: Tensor, *, everywhere: bool) -> list[Tensor]:
        """What all of them give, at the first, or everywhere; elsewhere nothing."""
        if self.size == 1:
            return [mine]
        received = [torch.empty_like(mine) for _ in range(self.size)] if everywhere or self.index == 0 else []
        if everywhere:
            dist.all_gather(received, mine, group=self.group)
        else:
            dist.gather(mine, received or None, group=self.group, group_dst=0)
        return received


def _whole_adapters(weights: Sequence[Weight], holders: _Holders, device: torch.device) -> dict[str, Tensor]:
    """The matrix A of every adapted weight by its name, whole on all holders: each row of the sum needs all of it."""
    adapted = [(w.name, w.a) for w in weights if w.a is not None]
    found: dict[str, Tensor] = {}
    for begin, end in buckets([a.numel() * a.itemsize for _, a in adapted], BUCKET_BYTES):
        some = [a for _, a in adapted[begin:end]]
        rows = (_rows(a).to(device) for a in some)
        whole = _whole(rows, [a.shape for a in some], holders, device, some[0].dtype, everywhere=True)
        found |= zip((name for name, _ in adapted[begin:end]), whole, strict=True)
    return found


def _whole(
    rows: Iterable[Tensor],
    shapes: Sequence[torch.Size],
    holders: _Holders,
    device: torch.device,
    dtype: torch.dtype,
    *,
    everywhere: bool = False,
) -> list[Tensor]:
    """The whole tensors of these shapes by one collective, from this rank's rows of each; [] where they do not go."""
    # A rank may have fewer rows than another, or none: each sends as many as the first.
    slots = [-(-shape[0] // holders.size) * prod(shape[1:]) for shape in shapes]
    mine = torch.zeros(sum(slots), dtype=dtype, device=device)
    for slot, x in zip(torch.split(mine, slots), rows, strict=True):
        slot[: x.numel()].copy_(x.flatten())
    cut = [torch.split(received, slots) for received in holders.gather(mine, everywhere=everywhere)]
    return [torch.cat(pieces)[: prod(shape)].view(shape) for shape, *pieces in zip(shapes, *cut, strict=True) if pieces]


def _rows_of(weight: Weight, adapters: dict[str, Tensor]) -> Weight:
    """This rank's rows of a weight and of its adapter."""
    b = None if weight.b is None else _rows(weight.b)
    return replace(weight, base=_rows(weight.base), a=adapters.get(weight.name), b=b)


def _rows(shards: Tensor) -> Tensor:
    return shards.to_local().detach() if isinstance(shards, DTensor) else shards.detach()


def _plain(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor that every rank has whole."""
    return tensor.detach().to(device, dtype if tensor.is_floating_point() else tensor.dtype)
