"""Samples one token per row of logits, with noise that depends on (seed, position) only."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

Float64 = npt.NDArray[np.float64]
LARGE, BLOCK = 4096, 64
"""A vocabulary of LARGE tokens or more is searched in blocks of BLOCK tokens."""


def uniforms(seed: int, count: int) -> Float64:
    """[count] numbers in [0, 1), the k-th for the k-th sampled token; a counter-based generator keyed by `seed`."""
    return _keyed.uniforms(seed % 2**64, count)


class _Keyed(threading.local):
    """A generator per thread, keyed again for each request: creating one takes 20 us, to read the system's entropy."""

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._random = np.random.Generator(self._bits).random
        self._state: Any = self._bits.state

    def uniforms(self, key: int, count: int) -> Float64:
        self._state["state"]["key"][0] = key
        self._bits.state = self._state
        return self._random(count)


_keyed = _Keyed()


def sample(
    logits: torch.Tensor, noise: torch.Tensor, temperature: torch.Tensor, greedy: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens by inversion of the cumulative distribution, and their log-probabilities.

    logits [B, V] float32, noise [B] float64 in [0, 1), temperature [B] float32 > 0, greedy [B] bool or None (no row
    is). Returns token ids [B] int64 and logprobs [B] float32: log_softmax(logits / temperature) at the token.
    """
    scaled = logits if bool((temperature == 1).all()) else logits / temperature[:, None]
    top = scaled.amax(-1, keepdim=True)
    tokens, total = _search((scaled - top).exp_(), noise)
    if greedy is not None:
        tokens = torch.where(greedy[:, None], scaled.argmax(-1, keepdim=True), tokens)
    logprobs = scaled.gather(1, tokens) - top - total.log()
    return tokens[:, 0], logprobs[:, 0].float()


def _search(weights: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weights [B, V] >= 0. Returns the tokens [B, 1] that `noise` falls on, and the sums of weights [B, 1] float64.

    In a large vocabulary the search finds a block of tokens first, then the token in it: a fifth of the time.
    """
    if weights.shape[-1] < LARGE:
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        return _invert(cumulative, noise)[0], cumulative[:, -1:]
    if rest := -weights.shape[-1] % BLOCK:
        weights = pad(weights, (0, rest))
    blocks = weights.view(len(weights), -1, BLOCK)
    sums = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    block, share = _invert(sums, noise)
    token, _ = _invert(blocks[torch.arange(len(blocks)), block[:, 0]].cumsum(-1, dtype=torch.float64), share)
    return block * BLOCK + token, sums[:, -1:]


def _invert(cumulative: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cumulative [B, N] float64, noise [B] in [0, 1). Returns the index [B, 1] at which each row passes its share
    `noise` of its own sum, and how far into that entry it does, [B] in [0, 1]. An entry of weight 0 is never hit."""
    last = cumulative[:, -1:]
    target = torch.minimum(noise[:, None] * last, torch.nextafter(last, torch.zeros_like(last)))
    at = torch.searchsorted(cumulative, target, right=True)
    before = cumulative.gather(1, (at - 1).clamp_(min=0)).masked_fill_(at == 0, 0.0)
    return at, ((target - before) / (cumulative.gather(1, at) - before))[:, 0]


def truncate(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits with the tokens outside top-k and min-p, then top-p, at minus infinity.

    logits [B, V]; temperature, top_p, min_p [B] float32; top_k [B] int64; 0 is off, 1 for top_p. The most probable
    token always stays. top-p is of the mass that the other two leave, as in vLLM.
    """
    ranked, order = logits.sort(dim=-1, descending=True)
    rank = torch.arange(logits.shape[-1])
    out = (top_k > 0)[:, None] & (rank >= top_k[:, None])
    scaled = ranked / temperature[:, None]
    if min_p is not None:
        # log 0 is minus infinity, below every finite logit
        out |= scaled - scaled[:, :1] < min_p.log()[:, None]
    probabilities = torch.softmax(scaled.masked_fill(out, -torch.inf), dim=-1)
    out |= (probabilities.cumsum(-1) - probabilities >= top_p[:, None]) & (top_p < 1)[:, None]
    return logits.masked_fill(torch.zeros_like(out).scatter(1, order, out), -torch.inf)
