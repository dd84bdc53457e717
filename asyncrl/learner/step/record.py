"""The record of each token in a training step, for its metrics and for the audit's list.

passes of a rank ─> Found: its own tokens, its own sums ──(added up over the ranks, once an update)──> Record
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asyncrl.learner.advantages.estimator import Advantages
from asyncrl.learner.backends.comparison import ROWS
from asyncrl.learner.batch import Batch


class Phase(NamedTuple):
    """A part of the step, by the clock of time.perf_counter()."""

    name: str
    begin: float
    end: float


@dataclass(slots=True, kw_only=True)
class Found:
    """What the passes of updates find, filled in as micro-batches pass."""

    current: Tensor
    """[T] float32, like all below but the bools"""
    entropy: Tensor
    weights: Tensor
    reference_kl: Tensor
    clipped: Tensor
    """[T] bool"""
    keep: Tensor
    """[T] bool"""
    teacher: Tensor | None = None
    """[6, T]: the `ROWS` of backends/comparison.py, or None without a teacher"""
    loss: float = 0.0
    """Summed over the updates, like policy_loss, value_loss and teacher_loss"""
    policy_loss: float = 0.0
    value_loss: float = 0.0
    teacher_loss: float = 0.0
    shown_nats: float = 0.0
    """Cross entropy of the demonstrations beside the groups, summed over their tokens and the updates"""
    shown_tokens: int = 0


_SUMS = ("loss", "policy_loss", "value_loss", "teacher_loss", "shown_nats", "shown_tokens")


@dataclass(slots=True, kw_only=True)
class Record(Found):
    """Of the whole batch, the same on every rank once an update's passes are over."""

    advantages: Tensor
    """[T] float32"""
    returns: Tensor
    """The target of the critic"""
    values: Tensor | None
    """The critic's at the start of the step, or None without one"""
    proximal: Tensor
    """Proximal logprobs: computed before the first update if needed, else the current ones of each token's update"""
    anchor: Tensor
    """Their substitute in the loss: the behaviour logprobs under `learner.proximal: behaviour`, an approximation under
    `approximate` with several updates, else the same values"""
    grad_norms: list[float] = field(default_factory=list)
    critic_grad_norms: list[float] = field(default_factory=list)
    lr: float = 0.0
    """The rate of the last update; 0 while only the critic learns"""
    lr_scale: float = 1.0
    """The factor of the last update, under `learner.ess_lr`"""
    steps_without_gradient: int = 0
    """Of the run, once this step is applied"""
    kl_coef: float = 0.0
    shaped_reward: float | None = None
    """Mean over the episodes, after `learner.shaping`; None without any"""
    proximal_s: float = 0.0
    shown_weight: float = 0.0
    phases: list[Phase] = field(default_factory=list)
    """What was computed when, in order"""

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds a phase of what is computed within."""
        begin = time.perf_counter()
        yield
        self.phases.append(Phase(name, begin, time.perf_counter()))

    @property
    def has_gradient(self) -> bool:
        """Whether any update had one that was not exactly 0."""
        return any(self.grad_norms) or any(self.critic_grad_norms)

    def include(self, found: Found, tokens: Tensor, names: Sequence[str], add_up: Callable[[Tensor], Tensor]) -> None:
        """Takes in what every rank found in an update: of its `tokens`, of which each rank has some, the fields
        `names`, and all sums. `add_up`: over the ranks."""
        mine = {name: getattr(found, name)[..., tokens] for name in names}
        for dtype, sent in ((torch.float32, torch.float32), (torch.bool, torch.uint8)):
            alike = {name: x for name, x in mine.items() if x.dtype == dtype}
            if alike:
                flat = add_up(torch.cat([x.flatten() for x in alike.values()]).to(sent)).to(dtype)
                pieces = torch.split(flat, [x.numel() for x in alike.values()])
                for (name, x), piece in zip(alike.items(), pieces, strict=True):
                    getattr(self, name)[..., tokens] = piece.view(x.shape)
        sums = add_up(torch.tensor([getattr(found, name) for name in _SUMS], dtype=torch.float64)).tolist()
        for name, value in zip(_SUMS, sums, strict=True):
            before = getattr(self, name)
            setattr(self, name, before + type(before)(value))


def blank(
    batch: Batch, estimated: Advantages, values: Tensor | None, proximal: Tensor | None, teacher: Tensor | None
) -> Record:
    """Nothing recorded yet but what is known before the first update. `teacher`: what is known of it, or None."""
    tokens = len(batch.token_ids)
    return Record(
        advantages=estimated.advantages,
        returns=estimated.returns,
        values=values,
        proximal=torch.zeros(tokens) if proximal is None else proximal.clone(),
        anchor=torch.zeros(tokens),
        teacher=teacher,
        **_nothing(tokens),
    )


def nothing_found(tokens: int, *, compared: bool) -> Found:
    """Of a batch of so many tokens. `compared`: with a teacher."""
    return Found(**_nothing(tokens), teacher=no_words(tokens) if compared else None)


def no_words(tokens: int) -> Tensor:
    """[6, T], where the passes of the updates compare with a teacher."""
    return torch.zeros(len(ROWS), tokens)


def _nothing(tokens: int) -> dict[str, Any]:
    fields: dict[str, Any] = {n: torch.zeros(tokens) for n in ("current", "entropy", "weights", "reference_kl")}
    return fields | {name: torch.zeros(tokens, dtype=torch.bool) for name in ("clipped", "keep")}
