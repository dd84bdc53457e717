"""Causal attention over rows laid end to end, for any transformers model: no mask of T x T, no padding.

Transformers looks an attention up by name; importing this file registers `varlen_sdpa`. It does not depend on how a
transformers version detects packed rows from position ids, which goes silently wrong with caches and masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from asyncrl.learner.backends.shared_prefixes import Segment

NAME = "varlen_sdpa"
ROUND = 64
"""One mask is built for the longest row and the longest prefix, both rounded up to a multiple of this; the mask of each
row is a view of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The layout of the rows of a pass: one object, so that torch.compile sees the same arguments in every pass."""

    segments: Sequence[Segment]
    """The tokens that each row computes itself, and how many it shares with earlier rows"""
    seen: Tensor | None
    """Indices of the tokens that the rows attend to, one row after another; None: no row shares any"""


def varlen_sdpa(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, *, scaling: float | None = None, dropout: float = 0.0
) -> Tensor:
    """query [1, heads, U, d], key and value [1, kv heads, U, d] -> [1, U, heads, d].

    A loop over rows: measured on CPU as fast as batches of rows of similar length, at any length. A row that shares its
    beginning with others reads the keys and values that were computed there (shared_prefixes.py).
    """
    segments = layout.segments
    if layout.seen is not None:
        key, value = _gather(key, layout.seen), _gather(value, layout.seen)
    mask_of = _mask_of([s for s in segments if s.prefix], query)
    queries = torch.split(query, [s.length for s in segments], dim=2)
    keys, values = (torch.split(x, [s.prefix + s.length for s in segments], dim=2) for x in (key, value))
    outputs = []
    for s, q, k, v in zip(segments, queries, keys, values, strict=True):
        mask = mask_of(s) if s.prefix else None
        if mask is not None and query.device.type != "cpu":
            k, v, mask = for_fused_kernels(q, k, v, mask)
        grouped = q.shape[1] != k.shape[1]
        outputs.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, dropout_p=dropout, enable_gqa=grouped
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2)


def for_fused_kernels(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Key, value and mask as a GPU's fused kernels take them: with a mask they share no heads, and want it aligned.
    Without those kernels torch makes all scores of every head."""
    heads = query.shape[1] // key.shape[1]
    return key.repeat_interleave(heads, dim=1), value.repeat_interleave(heads, dim=1), mask.contiguous()


def _gather(x: Tensor, seen: Tensor) -> Tensor:
    """[1, kv heads, U, d] -> [1, kv heads, len(seen), d]. An embedding, whose backward is fast and deterministic."""
    _, heads, total, d = x.shape
    table = x[0].transpose(0, 1).reshape(total, heads * d)
    return F.embedding(seen, table).view(len(seen), heads, d).transpose(0, 1)[None]


def _mask_of(sharing: Sequence[Segment], like: Tensor) -> Callable[[Segment], Tensor]:
    """The causal mask of a segment among `sharing`: [length, prefix + length], added to scores."""
    if not sharing:
        return lambda _: like
    own, prefix = (-(-max(n) // ROUND) * ROUND for n in ([s.length for s in sharing], [s.prefix for s in sharing]))
    largest = _causal(own, prefix, like.dtype, like.device)
    return lambda s: largest[: s.length, prefix - s.prefix : prefix + s.length]


@lru_cache(maxsize=1)
def _causal(own: int, prefix: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[own, prefix + own]: minus infinity behind the diagonal that follows `prefix`."""
    return torch.full((own, prefix + own), -torch.inf, dtype=dtype, device=device).triu(prefix + 1)


def packed(
    module: torch.nn.Module,
    *states: Tensor | None,
    layout: Layout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """`varlen_sdpa` as transformers calls it: query, key, value and mask, and what the model was called with."""
    query, key, value, mask = states
    assert query is not None
    assert key is not None
    assert value is not None
    if mask is not None:
        raise ValueError("varlen_sdpa takes no attention mask: the segments say which tokens a row attends to")
    longest = max(s.prefix + s.length for s in layout.segments)
    if sliding_window is not None and longest > sliding_window:
        raise ValueError(
            f"a row of {longest} tokens meets a layer with a sliding window of {sliding_window}, which "
            "the torch backend does not compute: lower env.max_tokens to the window."
        )
    return varlen_sdpa(query, key, value, layout, scaling=scaling, dropout=dropout), None


AttentionInterface.register(NAME, packed)
