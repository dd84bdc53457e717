from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.learner.backends.distribution import broadcast
from asyncrl.learner.backends.protocol import Packed, Scores, Want
from tests.learner.kept_ranks import on_kept_ranks

WIDTH = 4
MASKS = ([False, True, False, True, True], [False, True], [False, False, False])


def parts_of(wants: frozenset[Want]) -> list[Packed]:
    return [Packed(torch.arange(len(m)), torch.tensor(m), (len(m),), wants) for m in MASKS]


def scores_of(part: Packed) -> Scores:
    n, g = len(part.token_ids), torch.Generator().manual_seed(len(part.token_ids))
    return Scores(
        torch.randn(n, generator=g),
        torch.randn(n, generator=g),
        torch.randn(int(part.mask.sum()), WIDTH, generator=g) if "hidden" in part.wants else None,
        torch.randn(n, generator=g) if "sum_pi_sq" in part.wants else None,
    )


def fields(scores: Scores) -> list[Tensor | None]:
    return [scores.logprobs, scores.entropy, scores.hidden, scores.sum_pi_sq]


def told(wants: frozenset[Want]) -> list[list[Tensor | None]]:
    parts, group = parts_of(wants), dist.group.WORLD
    assert group is not None
    mine = [scores_of(part) for part in parts] if group.rank() == 1 else None
    there = broadcast(parts, mine, width=WIDTH, device=torch.device("cpu"), source=1, group=group)
    return [fields(scores) for scores in there]


@pytest.mark.parametrize("wants", [{"logprobs"}, {"hidden"}, {"logprobs", "hidden", "sum_pi_sq"}])
def test_what_one_rank_computed_the_others_are_told(wants: set[Want]) -> None:
    expected = [fields(scores_of(part)) for part in parts_of(frozenset(wants))]
    for found in on_kept_ranks(2, told, frozenset(wants)):
        for mine, theirs in zip(found, expected, strict=True):
            for x, y in zip(mine, theirs, strict=True):
                assert (x is None and y is None) or (x is not None and y is not None and torch.equal(x, y))
