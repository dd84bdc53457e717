"""The logprob of each sampled token, and the entropy, without holding all logits in memory.

The logits of a chunk of tokens are computed, used and discarded; the backward pass computes them again. Peak memory is
a chunk of logits plus the gradient of the output weights, whatever the number of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_LOGITS = 1 << 20
"""Approximate number of logits in memory at once; with a small vocabulary they fit a core's cache."""
CHUNK_TOKENS = 512
"""Least number of tokens in a chunk: fewer would waste the matrix product."""


def selected_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature) at `targets`, and that distribution's entropy.

    hidden [N, H], weight [V, H], targets [N] int64 -> logprobs [N], entropy [N], both at least float32, in nats.
    Exact (1e-6 in float32) in values and gradients; no second derivative. `chunk`: tokens per chunk.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}, expected above 0: greedy samples have no logprob to train on")
    chunk = chunk or max(CHUNK_TOKENS, CHUNK_LOGITS // weight.shape[0])
    logprobs, entropy = _Selected.apply(hidden, weight.to(hidden.dtype), targets, temperature, chunk)  # type: ignore[no-untyped-call]
    return logprobs, entropy


def sum_of_squared_probabilities(
    hidden: Tensor, weight: Tensor, temperature: float = 1.0, chunk: int | None = None
) -> Tensor:
    """Sum over the vocabulary of p², p = softmax(hidden @ weight.T / temperature): [N, H] -> [N], at least float32.

    The probability that two draws agree; without gradient.
    """
    chunk = chunk or max(CHUNK_TOKENS, CHUNK_LOGITS // weight.shape[0])
    exact = torch.promote_types(hidden.dtype, torch.float32)
    with torch.no_grad():
        cast = weight.to(hidden.dtype)
        parts = torch.split(hidden, chunk)
        return torch.cat([(2 * _log_softmax(h, cast, temperature, exact)).exp().sum(1) for h in parts])


class _Selected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = hidden.new_empty(len(hidden), dtype=exact)
        entropy = torch.empty_like(logprobs)
        for at in range(0, len(hidden), chunk):
            part = slice(at, at + chunk)
            log_p = _log_softmax(hidden[part], weight, temperature, exact)
            torch.gather(log_p, 1, targets[part, None], out=logprobs[part, None])
            entropy[part] = -(log_p.exp() * log_p).sum(1)
        ctx.save_for_backward(hidden, weight, targets, entropy)
        ctx.temperature, ctx.chunk, ctx.exact = temperature, chunk, exact
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, entropy = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        # Under adapters the head is frozen, and its gradient, as large as the head, is not computed.
        grad_weight = torch.zeros_like(weight, dtype=ctx.exact) if ctx.needs_input_grad[1] else None
        for at in range(0, len(hidden), ctx.chunk):
            part = slice(at, at + ctx.chunk)
            log_p = _log_softmax(hidden[part], weight, ctx.temperature, ctx.exact)
            p = log_p.exp()
            grad_logits = torch.zeros_like(p)
            if grad_entropy is not None:
                grad_logits -= p * (log_p + entropy[part, None]) * grad_entropy[part, None]
            if grad_logprobs is not None:
                g = grad_logprobs[part, None]
                grad_logits -= p * g
                grad_logits.scatter_add_(1, targets[part, None], g)
            grad_logits = (grad_logits / ctx.temperature).to(hidden.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight += grad_logits.t() @ hidden[part]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _log_softmax(hidden: Tensor, weight: Tensor, temperature: float, exact: torch.dtype) -> Tensor:
    return torch.log_softmax((hidden @ weight.t()).to(exact) / temperature, dim=-1)
