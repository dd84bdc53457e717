"""The record of each token in a training step, for its metrics and for the audit's list."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.learner.advantages.estimator import Advantages
from asyncrl.learner.batch import Batch


class Phase(NamedTuple):
    """A part of the step, by the clock of time.perf_counter()."""

    name: str
    begin: float
    end: float


@dataclass(slots=True)
class Record:
    """Filled in as micro-batches pass; with several updates, the later ones overwrite what is there per token."""

    advantages: Tensor
    """[T] float32, like all below but the bools"""
    returns: Tensor
    """The target of the critic"""
    values: Tensor | None
    """The critic's at the start of the step, or None without one"""
    proximal: Tensor
    """Proximal logprobs: computed before the first update if needed, else taken from the last one or approximated"""
    anchor: Tensor
    """Their substitute in the loss: the behaviour logprobs under `learner.proximal: behaviour`, else the same values"""
    current: Tensor
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
    shown_nats: float = 0.0
    """Cross entropy of the demonstrations beside the groups, summed over their tokens and the updates"""
    shown_tokens: int = 0
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


def blank(batch: Batch, estimated: Advantages, values: Tensor | None, proximal: Tensor | None) -> Record:
    """Nothing recorded yet but what is known before the first update."""

    def zeros() -> Tensor:
        return torch.zeros(len(batch.token_ids))

    def false() -> Tensor:
        return torch.zeros(len(batch.token_ids), dtype=torch.bool)

    return Record(
        advantages=estimated.advantages,
        returns=estimated.returns,
        values=values,
        proximal=zeros() if proximal is None else proximal.clone(),
        anchor=zeros(),
        current=zeros(),
        entropy=zeros(),
        weights=zeros(),
        reference_kl=zeros(),
        clipped=false(),
        keep=false(),
    )
