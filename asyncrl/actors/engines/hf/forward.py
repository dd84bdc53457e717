"""One forward pass of a transformers model over a static KV cache: any family, by the model's own code.

`decode.py` computes the same faster for the families that it supports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Rows = slice | torch.Tensor
"""Rows of the cache: `slice(0, n)` reads it in place, a LongTensor [B] gathers."""


class KVCache:
    """Keys and values of every slot. Those of one position are adjacent: one write per token, one copy per slot.

    The last position is scratch space, for values that are never read.
    """

    def __init__(self, model: Any, slots: int, length: int) -> None:
        c = model.config
        head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        heads = c.num_key_value_heads
        self.kv = torch.zeros(c.num_hidden_layers, slots, length + 1, 2 * heads, head_dim, dtype=model.dtype)
        self.k, self.v = (half.transpose(2, 3) for half in (self.kv[:, :, :, :heads], self.kv[:, :, :, heads:]))
        """Views: [layers, slots, kv_heads, length + 1, head_dim]"""
        self.slots, self.scratch = slots, length
        self.index = torch.arange(slots)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        self.kv[:, target, :length] = self.kv[:, source, :length]


@dataclass(frozen=True, slots=True)
class Part:
    """Sequences with the same width in a pass: some that prefill, or those that decode."""

    tokens: torch.Tensor
    """[B, L] int64"""
    positions: torch.Tensor
    """[B, L] int64; padding has the cache's scratch position."""
    rows: Rows
    """B rows of the cache."""
    last: torch.Tensor
    """[B] int64: the column whose logits are returned."""
    longest: int
    """Upper bound, exclusive, of the real positions of these sequences."""


class Forward(Protocol):
    """Writes keys and values of the tokens into the cache and returns the logits of each sequence's `last` column."""

    def __call__(self, parts: Sequence[Part]) -> torch.Tensor:
        """[B of all parts, V] float32, in order."""
        ...

    def refresh(self) -> None:
        """Called after the model's weights were changed in place."""
        ...


def attention_mask(part: Part, dtype: torch.dtype) -> torch.Tensor:
    """[B, 1, L, longest] in `dtype`, added to the scores: a query at position p sees the keys at 0..p."""
    hidden = torch.arange(part.longest) > part.positions[:, :, None]
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)[:, None]


class PlainForward:
    """Runs the model's own forward."""

    def __init__(self, model: Any, cache: KVCache) -> None:
        self._model, self._cache = model, cache

    @torch.inference_mode()
    def __call__(self, parts: Sequence[Part]) -> torch.Tensor:
        return torch.cat([self._one(part) for part in parts])

    def _one(self, part: Part) -> torch.Tensor:
        hidden = self._model.base_model(
            input_ids=part.tokens,
            position_ids=part.positions.clamp(max=self._cache.scratch - 1),
            attention_mask=attention_mask(part, self._model.dtype),
            past_key_values=_CacheView(self._cache, part),
            use_cache=True,
        ).last_hidden_state
        logits: torch.Tensor = self._model.get_output_embeddings()(hidden[torch.arange(len(hidden)), part.last])
        return logits.float()

    def refresh(self) -> None:
        return None


class _CacheView:
    """The cache interface that transformers' attention layers expect, for one call."""

    is_compileable = False
    is_sliding = (False,)

    def __init__(self, cache: KVCache, part: Part) -> None:
        self._cache, self._part = cache, part
        self._index = cache.index[part.rows][:, None]

    def update(
        self, k: torch.Tensor, v: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write k, v [B, kv_heads, L, head_dim] of the new tokens; returns those of all positions below `longest`."""
        keys, values = self._cache.k[layer], self._cache.v[layer]
        rows, positions, longest = self._part.rows, self._part.positions, self._part.longest
        keys[self._index, :, positions] = k.transpose(1, 2)
        values[self._index, :, positions] = v.transpose(1, 2)
        return keys[rows, :, :longest], values[rows, :, :longest]

    def get_seq_length(self, layer: int = 0) -> int:
        return self._part.longest
