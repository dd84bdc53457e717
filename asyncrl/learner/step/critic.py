"""The critic: V of each sampled token, the expected rest of the reward before it is drawn.

    shared     the policy's last hidden state ─> head        the value loss pulls the policy's weights too
    separate   a second model of the same kind ─> head       its own optimizer, at `learner.critic_lr`

The head is one linear layer that starts at 0, so the first advantages are plain returns. Every rank has it whole, reads
the states of its own micro-batches with it, and adds its gradient to that of the others once an update; the backend
carries the gradient of the states into the model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from asyncrl.config.learner import LearnerConfig
from asyncrl.errors import ConfigError, RunError
from asyncrl.learner.backends.distribution import alone
from asyncrl.learner.backends.protocol import Backend, Packed, Scores

OfValues = Callable[[Tensor], Tensor]
"""values [n] of a micro-batch's sampled tokens -> its share of the value loss, a scalar."""


class Critic:
    """The value head and, if separate, its model. Every rank calls it with the same arguments."""

    def __init__(self, learner: LearnerConfig, policy: Backend, trunk: Backend | None = None) -> None:
        """`trunk`: the second model; None: the policy's. Raises ConfigError if a backend gives no hidden states."""
        self.shared = trunk is None
        self._reads = trunk or policy
        """What gives the states"""
        self._trunk = trunk
        probe = Packed(torch.zeros(2, dtype=torch.long), torch.tensor([False, True]), (2,), frozenset(("hidden",)))
        hidden = self._reads.logprobs([probe])[0].hidden
        if hidden is None:
            raise ConfigError(
                f"learner.critic is {learner.critic}, and learner.backend {learner.backend} gives it no hidden "
                "states. Use learner.backend torch, or learner.critic none."
            )
        self._head = torch.nn.Linear(hidden.shape[1], 1, device=hidden.device)
        torch.nn.init.zeros_(self._head.weight)
        torch.nn.init.zeros_(self._head.bias)
        self._optimizer = torch.optim.AdamW(
            self._head.parameters(), lr=learner.critic_lr, betas=learner.betas, weight_decay=0.0
        )
        self._marked: tuple[dict[str, Tensor], dict[str, Any]] | None = None

    def values(self, parts: Sequence[Packed]) -> list[Tensor]:
        """[T] float32 on the CPU of each part, 0 where nothing was sampled, without gradient."""
        sizes = [len(part.mask) for part in parts]
        flat = torch.zeros(sum(sizes))
        values = torch.split(flat, sizes)

        def see(i: int, scores: Scores) -> None:
            values[i][parts[i].mask] = self.read(scores.hidden).cpu()

        self._reads.visit([_for_states(part) for part in parts], see)
        return list(torch.split(self._reads.add_up(flat), sizes))

    def read(self, hidden: Tensor | None) -> Tensor:
        """[n] float32 from states [n, H], with the head's gradient alone."""
        assert hidden is not None
        values: Tensor = self._head(hidden.detach().float().clone())[:, 0]
        return values

    def loss(self, hidden: Tensor | None, of_values: OfValues) -> Tensor:
        """A scalar with the gradient of the states; that of the head is accumulated as a side effect, on this rank."""
        assert hidden is not None
        of_values(self.read(hidden)).backward()  # type: ignore[no-untyped-call]
        weight, bias = self._head.weight.detach(), self._head.bias.detach()
        return of_values(functional.linear(hidden.float(), weight, bias)[:, 0])

    def accumulate(self, parts: Sequence[Packed], of_values: Callable[[int], OfValues]) -> float:
        """Forward and backward of the second model, `of_values(i)` for part i; the whole value loss."""
        assert self._trunk is not None
        losses: list[float] = []

        def loss(i: int, scores: Scores) -> Tensor:
            share = self.loss(scores.hidden, of_values(i))
            losses.append(float(share.detach()))
            return share

        self._trunk.accumulate([_for_states(p) for p in parts], loss)
        self.add_up_gradient()
        return float(self._trunk.add_up(torch.tensor(sum(losses), dtype=torch.float64)))

    def add_up_gradient(self) -> None:
        """Adds the gradients of the head that the ranks have accumulated; before, each has that of its own parts."""
        if alone():
            return
        given = list(self._head.parameters())
        mine = [torch.zeros_like(p) if p.grad is None else p.grad for p in given]
        whole = self._reads.add_up(torch.cat([x.flatten() for x in mine]))
        for p, x in zip(given, torch.split(whole, [p.numel() for p in given]), strict=True):
            p.grad = x.view_as(p).to(p.device)

    def clip(self, max_norm: float) -> float:
        """Head and second model each scaled down to `max_norm`; the norm of both before that."""
        head = float(torch.nn.utils.clip_grad_norm_(self._head.parameters(), max_norm))
        return head if self._trunk is None else math.hypot(head, self._trunk.clip(max_norm))

    def apply(self, lr: float) -> None:
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._trunk is not None:
            self._trunk.apply(lr)

    def discard(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        if self._trunk is not None:
            self._trunk.discard()

    def mark(self) -> None:
        self._marked = copy.deepcopy((self._head.state_dict(), self._optimizer.state_dict()))
        if self._trunk is not None:
            self._trunk.mark()

    def rollback(self) -> None:
        if self._marked is None:
            raise ValueError("rollback without mark")
        self._head.load_state_dict(self._marked[0])
        self._optimizer.load_state_dict(self._marked[1])
        if self._trunk is not None:
            self._trunk.rollback()

    def snapshot(self) -> Callable[[Path], None]:
        """A copy of everything, and the function that writes it into `critic/` of a checkpoint's folder."""
        head = copy.deepcopy([self._head.state_dict(), self._optimizer.state_dict()])
        trunk = None if self._trunk is None else self._trunk.snapshot()

        def write(folder: Path) -> None:
            (folder / "critic").mkdir(exist_ok=True)
            if leads():
                torch.save(head, folder / "critic" / "head.pt")
            if trunk is not None:
                trunk(folder / "critic")

        return write

    def load(self, folder: Path) -> None:
        """The inverse of `snapshot`. Raises RunError when the checkpoint has no critic of this kind."""
        kept = folder / "critic"
        if not (kept / "head.pt").is_file() or (kept / "hf").is_dir() == self.shared:
            raise RunError(
                f"checkpoint {folder} was not written with learner.critic {'shared' if self.shared else 'separate'}. "
                "Resume with the learner.critic that the run was started with."
            )
        head, optimizer = torch.load(kept / "head.pt", "cpu", weights_only=True)
        self._head.load_state_dict(head)
        self._optimizer.load_state_dict(optimizer)
        if self._trunk is not None:
            self._trunk.load(kept)


def leads() -> bool:
    """Whether this rank writes what is the same on all ranks."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def _for_states(part: Packed) -> Packed:
    return Packed(part.token_ids, part.mask, part.lengths, frozenset(("hidden",)))
