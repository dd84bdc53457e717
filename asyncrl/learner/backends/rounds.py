"""Who computes which micro-batch, and how the scores of all come to every rank.

    parts of a step ─> rounds of `size` micro-batches of like cost ─> each rank computes one of a round
                                                                            │
         loss(i, scores) of every part, everywhere  <── scores of the round, gathered

A rank that has none in the last round computes a token without loss: what is collective in a pass needs all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.learner.backends.protocol import Packed, Scores, Want
from asyncrl.learner.packing import rounds, row_cost

Score = Callable[[Packed], Scores]


class Rounds:
    """As the rank `rank` of the `size` that compute different micro-batches, members of `group`, sees them."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None = None) -> None:
        """`group` None: all ranks."""
        self._rank, self._size, self._group = rank, size, group

    def logprobs(self, score: Score, parts: Sequence[Packed]) -> list[Scores]:
        """Backend.logprobs, of a model that `score` calls."""
        found: dict[int, Scores] = {}
        with torch.no_grad():
            for together in self._rounds(parts):
                scores = score(self._own(parts, together))
                found |= zip(together, self._gathered(parts, together, scores), strict=True)
        return [found[i] for i in range(len(parts))]

    def accumulate(self, score: Score, parts: Sequence[Packed], loss: Callable[[int, Scores], Tensor]) -> None:
        """Backend.accumulate, of a model that `score` calls."""
        for together in self._rounds(parts):
            scores = score(self._own(parts, together))
            for r, (i, seen) in enumerate(zip(together, self._gathered(parts, together, scores), strict=True)):
                share = loss(i, scores if r == self._rank else seen)
                if r == self._rank:
                    own = share
                elif share.requires_grad:  # what hangs on the scores and is not sharded, such as a critic's head
                    share.backward()  # type: ignore[no-untyped-call]
            if self._rank >= len(together):
                own = 0.0 * sum((x.sum() for x in _fields(scores) if x.requires_grad), start=torch.zeros(()))
            own.backward()  # type: ignore[no-untyped-call]

    def _rounds(self, parts: Sequence[Packed]) -> list[list[int]]:
        return rounds([sum(row_cost(n) for n in part.lengths) for part in parts], self._size)

    def _own(self, parts: Sequence[Packed], together: Sequence[int]) -> Packed:
        if self._rank < len(together):
            return parts[together[self._rank]]
        return _nothing(parts[together[0]].wants)

    def _gathered(self, parts: Sequence[Packed], together: Sequence[int], own: Scores) -> list[Scores]:
        """Of each part of the round, without gradient."""
        if self._size == 1:
            return [_cut(own.hidden, parts[together[0]], torch.cat(_flat(own)))]
        flat = torch.cat(_flat(own))
        # How much each rank sends follows from its part, which all of them know.
        longest = max(_numbers(own.hidden, parts[i]) for i in together)
        padded = flat.new_zeros(max(longest, _numbers(own.hidden, _nothing(parts[0].wants))))
        padded[: len(flat)] = flat
        received = [torch.empty_like(padded) for _ in range(self._size)]
        dist.all_gather(received, padded, group=self._group)
        return [_cut(own.hidden, parts[i], x) for i, x in zip(together, received, strict=False)]


def _nothing(wants: frozenset[Want]) -> Packed:
    """The least that can be computed."""
    return Packed(torch.zeros(2, dtype=torch.long), torch.tensor([False, True]), (2,), wants)


def _fields(scores: Scores) -> list[Tensor]:
    return [x for x in (scores.logprobs, scores.entropy, scores.sum_pi_sq, scores.hidden) if x is not None]


def _flat(scores: Scores) -> list[Tensor]:
    return [x.detach().float().flatten() for x in _fields(scores)]


def _sizes(hidden: Tensor | None, part: Packed) -> list[int]:
    """Numbers in each of `_fields`; `hidden` of any part, None where it was not wanted."""
    tokens = [len(part.token_ids)] * (3 if "sum_pi_sq" in part.wants else 2)
    return tokens if hidden is None else [*tokens, int(part.mask.sum()) * hidden.shape[1]]


def _numbers(hidden: Tensor | None, part: Packed) -> int:
    return sum(_sizes(hidden, part))


def _cut(hidden: Tensor | None, part: Packed, flat: Tensor) -> Scores:
    logprobs, entropy, *rest = torch.split(flat[: _numbers(hidden, part)], _sizes(hidden, part))
    squares = rest.pop(0) if "sum_pi_sq" in part.wants else None
    return Scores(logprobs, entropy, None if hidden is None else rest[0].view(-1, hidden.shape[1]), squares)
