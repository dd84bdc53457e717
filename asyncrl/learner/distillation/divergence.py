"""Divergences of the policy p from the teacher q at one place of a row, and their gradients.

With m = (1 - beta) p + beta q and r = q / p, and sums over the vocabulary (or over a coarser partition of it):

    name         D                                        f(r)                                  A(r)
    reverse_kl   sum p (log p - log q)                    -log r                                log r
    forward_kl   sum q (log q - log p)                    r log r                               r - 1
    jsd          beta KL(q||m) + (1 - beta) KL(p||m)      beta r log(r/m') - (1-beta) log m'    (1 - beta) log m'

where m' = (1 - beta) + beta r. D = E_p[f(r)], so f estimates D from a token that p sampled, and
grad D = -E_p[A(r) grad log p]: A is the advantage that minimises D by policy gradient, 0 where p = q.

reverse_kl and forward_kl are TRL's GKD (2306.13649) at beta 1 and 0; its jsd between them is not rescaled, so it tends
to 0 and not to a KL at either end. log r as an advantage: Thinking Machines' on-policy distillation, slime, ROLL, verl.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["reverse_kl", "forward_kl", "jsd"]


@dataclass(frozen=True, slots=True)
class Divergence:
    kind: Kind = "reverse_kl"
    beta: float = 0.5
    """Under `jsd` the teacher's share of the mixture, in (0, 1)"""

    def terms(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """The share of each word in D, of the shape of `log_p` and `log_q`; they sum to D over the words."""
        if self.kind == "reverse_kl":
            return log_p.exp() * (log_p - log_q)
        if self.kind == "forward_kl":
            return log_q.exp() * (log_q - log_p)
        log_m = self._mixture(log_p, log_q)
        return self.beta * log_q.exp() * (log_q - log_m) + (1 - self.beta) * log_p.exp() * (log_p - log_m)

    def slopes(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """p dD/dp of each word, up to the same multiple of p for all: dD/dlogits = slopes - p sum(slopes)."""
        if self.kind == "reverse_kl":
            return log_p.exp() * (log_p - log_q)
        if self.kind == "forward_kl":
            return -log_q.exp()
        return (1 - self.beta) * log_p.exp() * (log_p - self._mixture(log_p, log_q))

    def estimate(self, log_r: Tensor) -> Tensor:
        """f(r) of tokens that p sampled, of the shape of `log_r`."""
        if self.kind == "reverse_kl":
            return -log_r
        if self.kind == "forward_kl":
            return log_r.exp() * log_r
        log_m = self._mixture(torch.zeros_like(log_r), log_r)
        return self.beta * log_r.exp() * (log_r - log_m) - (1 - self.beta) * log_m

    def advantage(self, log_r: Tensor) -> Tensor:
        """A(r) of tokens that p sampled, of the shape of `log_r`."""
        if self.kind == "reverse_kl":
            return log_r
        if self.kind == "forward_kl":
            return torch.expm1(log_r)
        return (1 - self.beta) * self._mixture(torch.zeros_like(log_r), log_r)

    def _mixture(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return torch.logaddexp(log_p + math.log1p(-self.beta), log_q + math.log(self.beta))


@dataclass(frozen=True, slots=True)
class Comparison:
    """The divergence, and the words that it tells apart."""

    divergence: Divergence = Divergence()
    k: int = 0
    """0: every word. Otherwise k words, and all others as one: a lower bound of D, since a coarser partition cannot
    tell two distributions apart better"""
    words_of: Literal["teacher", "student"] = "teacher"
    """Whose k most likely words"""
