"""JSON from rank to rank, of any length at each of them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from asyncrl.learner.backends.json_exchange import exchanged, tell, told
from tests.learner.kept_ranks import on_kept_ranks


def content(rank: int) -> Any:
    return [None, {"reason": "the disk is full: \udcff\u20ac"}, ["w" * 5000, [3, 4]]][rank]


def talked() -> tuple[list[Any], Any]:
    group = dist.group.WORLD
    assert group is not None
    everyone = exchanged(content(dist.get_rank()), group)
    if dist.get_rank() == 0:
        tell(content(1), group)
        return everyone, content(1)
    return everyone, told(group)


def test_every_rank_hears_what_each_tells_and_what_rank_0_tells() -> None:
    for everyone, of_first in on_kept_ranks(3, talked):
        assert everyone == [content(rank) for rank in range(3)]
        assert of_first == content(1)
