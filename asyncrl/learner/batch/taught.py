"""What a teacher on a server said of a batch's tokens, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.learner.backends.protocol import TeacherWords
from asyncrl.trajectory import Trajectory
from asyncrl.wire.teacher_scores import GroupScores


@dataclass(frozen=True, slots=True)
class Taught:
    """A teacher's scores of T tokens; 0 where the policy did not sample."""

    ids: Tensor
    """[T, k] int32: the teacher's most likely words, the most likely one first"""
    logprobs: Tensor
    """[T, k] float32"""
    sampled: Tensor
    """[T] float32: the teacher's logprob of the sampled token"""

    def take(self, t: Tensor) -> Taught:
        """The scores of the tokens [t], in their order."""
        return Taught(self.ids[t], self.logprobs[t], self.sampled[t])

    def of(self, mask: Tensor) -> TeacherWords:
        """The words of the n tokens of `mask` [T]."""
        return TeacherWords(self.ids[mask], self.logprobs[mask], self.sampled[mask])


def of_groups(trajectories: Sequence[Trajectory], scores: Sequence[GroupScores], k: int) -> Taught | None:
    """Scores of all rows laid end to end; None without scores. `k`: words of each token that are wanted.

    Raises ValueError where a trajectory has no scores, or they are of other tokens or of fewer words.
    """
    if not scores:
        return None
    by_group = {each.group: each for each in scores}
    ids: list[npt.NDArray[Any]] = []
    logprobs: list[npt.NDArray[Any]] = []
    sampled: list[npt.NDArray[Any]] = []
    for t in trajectories:
        mask = np.concatenate([row.mask for row in t.rows])
        given = by_group.get(t.id.group)
        if given is None or t.id.index >= len(given.scores):
            raise ValueError(f"trajectory {t.id} has no scores of the teacher")
        of_it = given.scores[t.id.index]
        if len(of_it) != int(mask.sum()) or given.k < k:
            raise ValueError(
                f"the scores of trajectory {t.id} are of {len(of_it)} tokens with {given.k} words each, expected "
                f"{int(mask.sum())} with {k}: a higher learner.teacher.k needs groups that were scored with it, so "
                "keep it on --resume, or begin another run"
            )
        for joined, part in ((ids, of_it.ids[:, :k]), (logprobs, of_it.logprobs[:, :k]), (sampled, of_it.sampled)):
            whole = np.zeros((len(mask), *part.shape[1:]), part.dtype)
            whole[mask] = part
            joined.append(whole)
    return Taught(*(torch.from_numpy(np.concatenate(parts)) for parts in (ids, logprobs, sampled)))
