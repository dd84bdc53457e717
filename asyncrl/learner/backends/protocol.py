"""The interface of a backend, which holds the model: scores of packed rows, gradients, updates, weights.

The backend runs the passes, the learner defines the loss: `accumulate` takes a function from the scores of a
micro-batch to its share of the loss, so that the same learner drives one process, sharded parameters, or a pipeline
whose last stage alone sees logprobs.

On several ranks every method is collective: all of them call it, in the same order, with the same arguments. Each is
given every micro-batch of the step and computes some. `logprobs` returns the scores of all on every rank, because
baselines, norms and guards are of the whole batch. `accumulate` and `visit` show a rank the scores of its own parts
alone, so that a rank's work does not grow with the number of ranks; what all need of that (the record of the step, the
gradient of a critic's head) the learner exchanges by `add_up`, once an update. So a step's result does not depend on
the number of ranks, and is the same on every one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

Want = Literal["logprobs", "entropy", "hidden", "sum_pi_sq", "teacher"]
"""entropy: beside logprobs, a quarter more work in the head. hidden: the state that a critic reads. sum_pi_sq: over the
whole vocabulary. teacher: compared with the teacher of `learner.teacher`, which computes the part too unless servers
have said what is compared."""


@dataclass(frozen=True, slots=True)
class TeacherWords:
    """What a teacher on a server said of n tokens, at temperature 1."""

    ids: Tensor
    """[n, k] int32: its most likely words, the most likely one first; k is 0 where only the sampled one is known"""
    logprobs: Tensor
    """[n, k] float32, nats"""
    sampled: Tensor
    """[n] float32, nats: of the sampled token"""


@dataclass(frozen=True, slots=True)
class Hints:
    """Tokens that a teacher reads within the rows of a Packed, and the policy does not."""

    token_ids: Tensor
    """[S] int64: those of all rows, laid end to end"""
    lengths: tuple[int, ...]
    """Tokens of each row; 0: it reads none"""
    places: tuple[int, ...]
    """The token of each row before which they stand"""


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows laid end to end, which one forward pass computes. No row attends to another."""

    token_ids: Tensor
    """[T] int64"""
    mask: Tensor
    """[T] bool: tokens whose logprob is wanted. Never the first of a row: nothing predicts it."""
    lengths: tuple[int, ...]
    """Tokens of each row, at least 1; their sum is T."""
    wants: frozenset[Want] = frozenset(("logprobs", "entropy"))
    """What to compute."""
    kept: Tensor | None = None
    """[n, K] int32, of the n tokens of the mask: the ids that the token was drawn from, over which its scores are
    taken, -1 behind them; the whole vocabulary where there are none. None: for all n"""
    recorded: TeacherWords | None = None
    """Of the n tokens of the mask, where a teacher on a server said it"""
    hints: Hints | None = None
    """Where the teacher is shown more than the policy"""


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of a Packed at the sampling temperature; 0 outside its mask, and where they were not wanted."""

    logprobs: Tensor
    """[T] float32, nats"""
    entropy: Tensor
    """[T] float32, nats: of the distribution that the token was drawn from"""
    hidden: Tensor | None = None
    """[n, H], if wanted: the last hidden state before each of the n tokens of the mask, from which it was drawn"""
    sum_pi_sq: Tensor | None = None
    """[T] float32, if wanted: the sum of that distribution's squared probabilities, without gradient"""
    teacher: Tensor | None = None
    """[6, T] float32, if wanted: the `ROWS` of comparison.py, of which the first carries a gradient"""


class MovesTeacher(Protocol):
    """What a backend has beside the others' methods, where the teacher is the policy itself or an average of it."""

    def move_teacher(self) -> None:
        """Moves the teacher towards the policy, by `learner.teacher.update_rate`."""
        ...


class Backend(Protocol):
    dp_size: int
    """Micro-batches computed at the same time; a multiple of this number keeps every rank busy."""
    device: torch.device
    teacher_digest: str
    """Of the teacher's weights, or of one that moves by which rule; empty without one, and in a backend that has no
    teachers."""

    def logprobs(self, parts: Sequence[Packed], *, reference: bool = False) -> list[Scores]:
        """Scores without gradient; with `reference`, those of the frozen reference model."""
        ...

    def refresh_reference(self) -> None:
        """Copies the current policy into the reference model, which begins as the run's first model."""
        ...

    def accumulate(self, parts: Sequence[Packed], loss: Callable[[int, Scores], Tensor]) -> None:
        """Forward and backward of every part, adding to the gradient; the gradients of the parts add up.

        `loss(i, scores)` is called once for every part i, on the rank that computed its scores. Where several ranks
        compute one part together, it is called on each that has the scores: all of them (tensor parallel), or those of
        the last stage (pipeline).
        """
        ...

    def visit(self, parts: Sequence[Packed], see: Callable[[int, Scores], object]) -> None:
        """Forward of every part without gradient; `see(i, scores)` is called where `accumulate` would call the loss."""
        ...

    def add_up(self, mine: Tensor) -> Tensor:
        """Sum, on the CPU and the same bits on every rank, of what `accumulate` or `visit` found on each rank; counted
        once where several ranks compute a part together. A single process returns `mine`."""
        ...

    def clip(self, max_norm: float) -> float:
        """Scale the gradient down to `max_norm`; returns its norm before that (not finite if the gradient is not)."""
        ...

    def apply(self, lr: float) -> None:
        """One optimizer update with the accumulated gradient, which is cleared."""
        ...

    def discard(self) -> None:
        """Clear the accumulated gradient."""
        ...

    def mark(self) -> None:
        """Copy weights and optimizer state, for `rollback`."""
        ...

    def rollback(self) -> None: ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full weights with Hugging Face names, one at a time, in the model's dtype; tied ones once.

        On several ranks each must iterate to the end; rank 0 alone receives values.
        """
        ...

    def save(self, folder: Path) -> None:
        """Weights (`hf/`, loadable by transformers), optimizer, and under `learner.reference_every` the reference, into
        a new checkpoint's folder."""
        ...

    def snapshot(self) -> Callable[[Path], None]:
        """Copies all that `save` writes; returns the function that writes the copy while training continues: once, on
        every rank, in any thread. Raises OSError, like `save`, when the disk is full."""
        ...

    def load(self, folder: Path) -> None:
        """The inverse of `save`, at any number of ranks. Raises RunError when the checkpoint is damaged or of another
        model."""
        ...
