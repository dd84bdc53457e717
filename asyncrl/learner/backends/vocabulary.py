"""The words of a vocabulary, all of which one process has, or of which it has a part.

What is computed of chunks of logits [c, words here] goes through these few operations, so that a comparison of two
policies (comparison.py, recorded.py) is written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Words(Protocol):
    """Every rank that has a part calls each method, and gets the same."""

    @property
    def count(self) -> int:
        """Of the whole vocabulary."""
        ...

    @property
    def first(self) -> int:
        """The word of the first column here."""
        ...

    @property
    def here(self) -> int:
        """Columns here."""
        ...

    def log_sums(self, logits: Sequence[Tensor]) -> list[Tensor]:
        """[c] logsumexp over the vocabulary, of each."""
        ...

    def add_up(self, sums: Tensor) -> Tensor:
        """The sum over the parts; may be computed in place."""
        ...

    def at(self, x: Tensor, ids: Tensor) -> Tensor:
        """[c, k] values of x at the words `ids` [c, k]."""
        ...

    def top(self, x: Tensor, k: int) -> Tensor:
        """[c, k] int64: the words of the k greatest values."""
        ...

    def greatest(self, x: Tensor) -> Tensor:
        """[c] int64: the word of the greatest value."""
        ...


class Whole:
    """All words are here."""

    first = 0

    def __init__(self, count: int) -> None:
        self.count = self.here = count

    def log_sums(self, logits: Sequence[Tensor]) -> list[Tensor]:
        return [torch.logsumexp(x, 1) for x in logits]

    def add_up(self, sums: Tensor) -> Tensor:
        return sums

    def at(self, x: Tensor, ids: Tensor) -> Tensor:
        return x.gather(1, ids)

    def top(self, x: Tensor, k: int) -> Tensor:
        return x.topk(k, 1).indices

    def greatest(self, x: Tensor) -> Tensor:
        return x.argmax(1)


def held(ids: Tensor, first: int, columns: int, among: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Which of the words `ids`, where `among` is true, are of `columns` columns from `first` on, and their column; 0
    where they are not."""
    here = (ids >= first) & (ids < first + columns)
    if among is not None:
        here = here & among
    return here, torch.where(here, ids - first, 0)


def marked(like: Tensor, here: Tensor, column: Tensor) -> Tensor:
    """[c, columns] bool, of the shape of `like`: the columns of `held`."""
    return torch.zeros_like(like).scatter_add_(1, column, here.to(like.dtype)) > 0 if like.shape[1] else like > 0
