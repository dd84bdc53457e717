"""From logits to one sampled token per row, with noise that depends on (seed, position) and on nothing else."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Float64 = npt.NDArray[np.float64]


def uniforms(seed: int, count: int) -> Float64:
    """[count] numbers in [0, 1), the k-th for the k-th sampled token; a counter-based generator keyed by `seed`."""
    return np.random.Generator(np.random.Philox(key=seed % 2**64)).random(count)


def sample(
    logits: torch.Tensor, noise: torch.Tensor, temperature: torch.Tensor, greedy: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens by inversion of the cumulative distribution, and their log-probabilities.

    logits [B, V] float32, noise [B] float64 in [0, 1), temperature [B] float32 > 0, greedy [B] bool or None (no row
    is). Returns token ids [B] int64 and logprobs [B] float32: log_softmax(logits / temperature) at the token.
    """
    logprobs = torch.log_softmax(logits / temperature[:, None], dim=-1)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    # Scaled by the row's own sum, the target stays below the last entry, so a token of probability 0 is never hit.
    target = noise[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True)
    tokens.clamp_(max=logits.shape[-1] - 1)
    if greedy is not None:
        tokens = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]


def truncate(logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Logits with the tokens outside top-k, then top-p, at minus infinity.

    logits [B, V]; temperature, top_p [B] float32; top_k [B] int64, 0 is off. The most probable token always stays.
    """
    ranked, order = logits.sort(dim=-1, descending=True)
    rank = torch.arange(logits.shape[-1])
    out = (top_k > 0)[:, None] & (rank >= top_k[:, None])
    probabilities = torch.softmax((ranked / temperature[:, None]).masked_fill(out, -torch.inf), dim=-1)
    out |= (probabilities.cumsum(-1) - probabilities >= top_p[:, None]) & (top_p < 1)[:, None]
    return logits.masked_fill(torch.zeros_like(out).scatter(1, order, out), -torch.inf)
