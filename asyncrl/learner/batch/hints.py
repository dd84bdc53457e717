"""What a teacher that is the policy itself is shown within a batch's rows, as tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.learner.backends.protocol import Hints
from asyncrl.trajectory import Trajectory

Place = tuple[Sequence[int], int]
"""Of one row: the tokens that the teacher reads, and the token of the row before which they stand."""
HintsOf = Callable[[Trajectory], Sequence[Place]]
"""Those of each row of a trajectory."""


@dataclass(frozen=True, slots=True)
class RowHints:
    """Hints of B rows."""

    token_ids: Tensor
    """[S] int64: those of all rows, laid end to end"""
    lengths: Tensor
    """[B] int64; 0: the teacher reads what the policy reads"""
    places: Tensor
    """[B] int64"""

    def take(self, row_ids: Tensor) -> RowHints:
        """Those of the rows [b], in their order."""
        of_each = torch.split(self.token_ids, self.lengths.tolist())
        token_ids = torch.cat([of_each[row] for row in row_ids.tolist()] or [self.token_ids[:0]])
        return RowHints(token_ids, self.lengths[row_ids], self.places[row_ids])

    def packed(self) -> Hints:
        return Hints(self.token_ids, tuple(self.lengths.tolist()), tuple(self.places.tolist()))


def of_trajectories(trajectories: Sequence[Trajectory], hints_of: HintsOf) -> RowHints:
    """Those of all rows, in the order of the trajectories."""
    of_rows = [each for t in trajectories for each in hints_of(t)]
    ids = [token for tokens, _ in of_rows for token in tokens]
    lengths = torch.tensor([len(tokens) for tokens, _ in of_rows], dtype=torch.int64)
    places = torch.tensor([place for _, place in of_rows], dtype=torch.int64)
    return RowHints(torch.tensor(ids, dtype=torch.int64), lengths, places)
