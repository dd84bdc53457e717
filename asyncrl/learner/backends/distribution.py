"""Which rank computes which micro-batch, and what all ranks are told of it.

    parts of a step ─> rounds of `size` micro-batches of similar cost ─> each rank computes one of a round
                                                                            │
         logprobs: the scores of the round, gathered on every rank  <───────┤
         accumulate, visit: loss(i, scores) of its own part alone   <───────┘

What comes of a loss is added up over the ranks by its caller, once for all parts (`add_up`). A rank that has none in
the last round computes a token without loss, because a pass is collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.learner.backends.comparison import ROWS
from asyncrl.learner.backends.protocol import Packed, Scores, TeacherWords, Want
from asyncrl.learner.packing import rounds, row_cost

Score = Callable[[Packed], Scores]
Loss = Callable[[int, Scores], Tensor]
See = Callable[[int, Scores], object]


class Rounds:
    """The rounds of a step, for rank `rank` of the `size` members of `group`, which compute different micro-batches."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None = None) -> None:
        """`group` None: all ranks."""
        self._rank, self._size, self._group = rank, size, group

    def logprobs(self, score: Score, parts: Sequence[Packed]) -> list[Scores]:
        """Backend.logprobs of the model behind `score`."""
        scores_of: dict[int, Scores] = {}
        with torch.no_grad():
            for in_round in self.plan(parts):
                scores = score(self.own(parts, in_round))
                scores_of |= zip(in_round, self.gathered(parts, in_round, scores), strict=True)
        return [scores_of[i] for i in range(len(parts))]

    def visit(self, score: Score, parts: Sequence[Packed], see: See) -> None:
        """Backend.visit of the model behind `score`."""
        with torch.no_grad():
            for in_round in self.plan(parts):
                self.show(in_round, score(self.own(parts, in_round)), see)

    def accumulate(self, score: Score, parts: Sequence[Packed], loss: Loss) -> None:
        """Backend.accumulate of the model behind `score`."""
        for in_round in self.plan(parts):
            share = self.share(in_round, score(self.own(parts, in_round)), loss)
            share.backward()  # type: ignore[no-untyped-call]

    def plan(self, parts: Sequence[Packed]) -> list[list[int]]:
        """Indices of the parts that each round computes."""
        return rounds([sum(row_cost(n) for n in part.lengths) for part in parts], self._size)

    def own(self, parts: Sequence[Packed], in_round: Sequence[int]) -> Packed:
        """The part that this rank computes in a round."""
        if self._rank < len(in_round):
            return parts[in_round[self._rank]]
        first = parts[in_round[0]]
        return replace(_smallest(first.wants), recorded=_of_one(first.recorded))

    def gathered(self, parts: Sequence[Packed], in_round: Sequence[int], own: Scores) -> list[Scores]:
        """Scores of each part of the round, without gradient, on every rank; `own`: those that this rank computed."""
        width = 0 if own.hidden is None else own.hidden.shape[1]
        flat = _flat(own)
        if self._size == 1:
            return [_cut(width, parts[in_round[0]], flat)]
        # Every rank knows all parts, and so how much each rank sends.
        longest = max(_numbers(width, parts[i]) for i in in_round)
        padded = flat.new_zeros(max(longest, _numbers(width, _smallest(parts[0].wants))))
        padded[: len(flat)] = flat
        received = [torch.empty_like(padded) for _ in range(self._size)]
        dist.all_gather(received, padded, group=self._group)
        return [_cut(width, parts[i], x) for i, x in zip(in_round, received, strict=False)]

    def share(self, in_round: Sequence[int], own: Scores, loss: Loss) -> Tensor:
        """This rank's share of a round's loss, from the scores that it computed; 0 without a part."""
        if self._rank < len(in_round):
            return loss(in_round[self._rank], own)
        return 0.0 * sum((x.sum() for x in _fields(own) if x.requires_grad), start=torch.zeros(()))

    def show(self, in_round: Sequence[int], own: Scores, see: See) -> None:
        """Calls `see` with the part that this rank computed in a round, if it has one."""
        if self._rank < len(in_round):
            see(in_round[self._rank], own)


def alone() -> bool:
    """Whether no other process trains with this one."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def add_up(mine: Tensor, device: torch.device, *, counts: bool = True) -> Tensor:
    """Sum over all ranks, on the CPU; what a rank that does not count says is left out. `device`: of the exchange."""
    total = mine.to(device, copy=True) if counts else torch.zeros_like(mine, device=device)
    dist.all_reduce(total)
    return total.cpu()


def broadcast(
    parts: Sequence[Packed],
    scores: Sequence[Scores] | None,
    *,
    width: int,
    device: torch.device,
    source: int,
    group: dist.ProcessGroup,
) -> list[Scores]:
    """Scores of `parts` on every rank of `group`, without gradient, from its rank `source`, which alone gives `scores`.
    `width`: of a hidden state."""
    numbers = [_numbers(width, part) for part in parts]
    flat = torch.empty(sum(numbers), device=device) if scores is None else torch.cat([*map(_flat, scores)])
    dist.broadcast(flat, group=group, group_src=source)
    return [_cut(width, part, x) for part, x in zip(parts, torch.split(flat, numbers), strict=True)]


def _smallest(wants: frozenset[Want]) -> Packed:
    """The smallest part that can be computed."""
    return Packed(torch.zeros(2, dtype=torch.long), torch.tensor([False, True]), (2,), wants)


def _of_one(recorded: TeacherWords | None) -> TeacherWords | None:
    """What a server said of a token, for the smallest part; only shapes matter."""
    if recorded is None:
        return None
    ids, logprobs = (
        torch.zeros(1, recorded.ids.shape[1], dtype=torch.int32),
        torch.full((1, recorded.ids.shape[1]), -9.0),
    )
    return TeacherWords(ids, logprobs, torch.full((1,), -9.0))


def _fields(scores: Scores) -> list[Tensor]:
    of_tokens = scores.logprobs, scores.entropy, scores.sum_pi_sq, scores.teacher
    return [x for x in (*of_tokens, scores.hidden) if x is not None]


def _flat(scores: Scores) -> Tensor:
    return torch.cat([x.detach().float().flatten() for x in _fields(scores)])


def _sizes(width: int, part: Packed) -> list[int]:
    """Numbers in each of `_fields`; `width` of a hidden state."""
    tokens = [len(part.token_ids)] * (3 if "sum_pi_sq" in part.wants else 2)
    if "teacher" in part.wants:
        tokens.append(len(ROWS) * len(part.token_ids))
    return [*tokens, int(part.mask.sum()) * width] if "hidden" in part.wants else tokens


def _numbers(width: int, part: Packed) -> int:
    return sum(_sizes(width, part))


def _cut(width: int, part: Packed, flat: Tensor) -> Scores:
    logprobs, entropy, *rest = torch.split(flat[: _numbers(width, part)], _sizes(width, part))
    squares = rest.pop(0) if "sum_pi_sq" in part.wants else None
    teacher = rest.pop(0).view(len(ROWS), -1) if "teacher" in part.wants else None
    return Scores(logprobs, entropy, rest[0].view(-1, width) if "hidden" in part.wants else None, squares, teacher)
