"""The teacher in a training step: its term of the loss, what is recorded of it, and when a batch is refused for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from asyncrl.learner.backends.comparison import ROWS
from asyncrl.learner.backends.protocol import Scores
from asyncrl.learner.batch import Batch
from asyncrl.learner.objective.objective import Norm, Objective
from asyncrl.learner.ragged import masked_mean, row_of_token
from asyncrl.learner.step.record import Found, Record
from asyncrl.learner.step.rollback import Refused
from asyncrl.tracking.series import EDGES

_SHOWN = {"entropy": "entropy", "agrees": "agreement", "reverse_kl": "reverse_kl", "forward_kl": "forward_kl"}
"""Series of the rows that are simply averaged."""


class Lessons:
    """The teacher's term over one mini-batch's passes."""

    def __init__(self, objective: Objective, found: Found, seed_slope: Tensor | None = None) -> None:
        """`seed_slope` [T]: the gradient of the term by each token's divergence, where the passes only carry it."""
        self._objective, self._found, self._slope = objective, found, seed_slope

    def loss(self, rows: Batch, t: Tensor, scores: Scores, norm: Norm) -> Tensor:
        """The term of a micro-batch, a scalar with gradient; it is recorded, with what was seen of the tokens `t`."""
        assert scores.teacher is not None
        assert self._found.teacher is not None
        seen = scores.teacher.to("cpu")
        self._found.teacher[:, t] = seen.detach().float()
        term, current = self._objective.teacher, scores.logprobs.to("cpu")
        if not term.in_loss:
            return torch.zeros(())
        per_token = term.per_token(rows, current, seen)
        if self._slope is not None:
            share = (per_token * self._slope[t]).sum()
        else:
            share = term.coef * self._objective.aggregate(per_token, rows, norm, rows.mask)
        self._found.loss += float(share.detach())
        self._found.teacher_loss += float(share.detach())
        return share


def slope_of(objective: Objective, minibatch: Batch, t: Tensor, total: int) -> Tensor:
    """[T] gradient of the term by each token's divergence."""
    zeros = torch.zeros(len(t)).requires_grad_()
    term = objective.teacher.coef * objective.aggregate(zeros, minibatch, Norm(), minibatch.mask)
    term.backward()  # type: ignore[no-untyped-call]
    slope = torch.zeros(total)
    if zeros.grad is not None:
        slope[t] = zeros.grad
    return slope


def refuse_unusable(record: Record, batch: Batch) -> None:
    """Raises Refused where a number of the teacher is not finite on a token that was sampled."""
    if record.teacher is None:
        return
    bad = ~record.teacher[:, batch.sampled].isfinite().all(0)
    if bad.any():
        raise Refused(
            f"the teacher's logprobs are not finite at {int(bad.sum())} of {len(bad)} sampled tokens: its weights are "
            "damaged, or it has no word for them. Check the model in learner.teacher.path, or try model.dtype float32"
        )


def teacher_metrics(record: Record, batch: Batch, over: str) -> dict[str, float]:
    """Means over the trained tokens, and the KL by turn and by position; empty without a teacher."""
    if record.teacher is None:
        return {}
    seen, mask = dict(zip(ROWS, record.teacher, strict=True)), batch.mask & batch.compared
    if batch.taught is not None:
        return _of_recorded(record, batch, seen)
    values = {f"teacher/{name}": float(masked_mean(seen[row], mask)) for row, name in _SHOWN.items()}
    if batch.hints is not None:
        hinted = batch.hints.lengths > 0
        values["teacher/hinted"] = float(hinted.float().mean())
        values["teacher/hint_tokens"] = float(batch.hints.lengths.sum() / hinted.sum().clamp(min=1))
    of_objective = "teacher/lower_bound" if over == "top_k" else "teacher/divergence"
    values |= {of_objective: float(masked_mean(seen["divergence"], mask)), "teacher/loss": record.teacher_loss}
    turn, position = places(batch)
    for family, place in (("turn", turn), ("position", position)):
        for name, inside in _buckets(place, EDGES[family]):
            if (part := inside & mask).any():
                values[f"teacher/reverse_kl_by_{family}/{name}"] = float(masked_mean(seen["reverse_kl"], part))
    return values


def _of_recorded(record: Record, batch: Batch, seen: Mapping[str, Tensor]) -> dict[str, float]:
    """What can be said of a teacher of which a server gave a few words: bounds, not the whole vocabulary."""
    apart = record.current - seen["logprobs"]
    values = {"teacher/loss": record.teacher_loss, "teacher/log_ratio": float(masked_mean(apart, batch.mask))}
    if batch.taught is None or not batch.taught.ids.shape[1]:
        return values
    of_words = {"divergence": "lower_bound", "agrees": "agreement"}
    return values | {f"teacher/{name}": float(masked_mean(seen[row], batch.mask)) for row, name in of_words.items()}


def places(batch: Batch) -> tuple[Tensor, Tensor]:
    """Of each sampled token, its turn in its row and its position among the tokens of that turn, from 1 on; [T] each.

    A turn is a run of sampled tokens.
    """
    sampled = batch.sampled
    row = row_of_token(batch.lengths, len(sampled))
    before = torch.zeros_like(sampled)
    before[1:] = sampled[:-1] & (row[1:] == row[:-1])
    begins = (sampled & ~before).long()
    turns = begins.cumsum(0)
    of_row = torch.zeros(len(batch), dtype=torch.long).scatter_reduce(
        0, row, turns - begins, "amin", include_self=False
    )
    index = torch.arange(len(sampled))
    begin = torch.where(begins.bool(), index, 0).cummax(0).values
    return turns - of_row[row], index - begin + 1


def _buckets(place: Tensor, edges: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Name and tokens [T] of each bucket; `edges`: the lowest place of each."""
    above = [*list(edges.values())[1:], None]
    for (name, low), high in zip(edges.items(), above, strict=True):
        yield name, (place >= low) if high is None else (place >= low) & (place < high)
