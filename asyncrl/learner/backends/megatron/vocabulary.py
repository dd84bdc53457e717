"""A vocabulary that is split over the tensor-parallel ranks, each of which has the logits of its part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.learner.backends.vocabulary import held


class Split:
    """One rank's part of the words. The ranks exchange a few numbers a token, and the k greatest of each part."""

    def __init__(self, count: int, first: int, rows: int, group: dist.ProcessGroup) -> None:
        """`rows`: of the head on this rank, from `first` on; those beyond `count` belong to no word."""
        self.count, self.first, self.here = count, first, max(0, min(rows, count - first))
        self._group = group

    def log_sums(self, logits: Sequence[Tensor]) -> list[Tensor]:
        tops = torch.stack([_greatest(x) for x in logits])
        dist.all_reduce(tops, dist.ReduceOp.MAX, group=self._group)
        sums = self.add_up(torch.stack([(x - top[:, None]).exp_().sum(1) for x, top in zip(logits, tops, strict=True)]))
        return [*(tops + sums.log())]

    def add_up(self, sums: Tensor) -> Tensor:
        dist.all_reduce(sums, group=self._group)
        return sums

    def at(self, x: Tensor, ids: Tensor) -> Tensor:
        if not self.here:
            return self.add_up(x.new_zeros(ids.shape))
        here, column = held(ids, self.first, self.here)
        return self.add_up(torch.where(here, x.gather(1, column), 0.0))

    def top(self, x: Tensor, k: int) -> Tensor:
        # Equal values are ordered by their word, on every rank.
        mine = x.topk(min(k, self.here), 1)
        values = x.new_full((len(x), k), -torch.inf)
        ids = torch.zeros(len(x), k, dtype=torch.long, device=x.device)
        values[:, : mine.values.shape[1]] = mine.values
        ids[:, : mine.values.shape[1]] = mine.indices + self.first
        best = torch.sort(self._of_all(values), dim=1, descending=True, stable=True).indices[:, :k]
        return self._of_all(ids).gather(1, best)

    def greatest(self, x: Tensor) -> Tensor:
        return self.top(x, 1)[:, 0]

    def _of_all(self, mine: Tensor) -> Tensor:
        """[c, k] of each rank, side by side."""
        found = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(found, mine, group=self._group)
        return torch.cat(found, 1)


def _greatest(x: Tensor) -> Tensor:
    return x.amax(1) if x.shape[1] else x.new_full((len(x),), -torch.inf)
