"""Causal attention over rows laid end to end, for any transformers model: no mask of T x T, no padding.

Transformers looks an attention up by name; importing this file registers `varlen_sdpa`. It does not depend on how a
transformers version detects packed rows from position ids, which goes silently wrong with caches and masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from asyncrl.learner.prefixes import Segment

NAME = "varlen_sdpa"


def varlen_sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Sequence[Segment],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, U, d], key and value [1, kv heads, U, d] -> [1, U, heads, d].

    A loop over rows: measured on CPU as fast as batches of rows of like length, at any length. A row that shares its
    beginning with another one (prefixes.py) reads the keys and values that were computed there.
    """
    if attention_mask is not None:
        raise ValueError("varlen_sdpa takes no attention_mask: the segments say who sees whom")
    longest = max(s.prefix + s.length for s in segments)
    if sliding_window is not None and longest > sliding_window:
        raise ValueError(
            f"a row of {longest} tokens meets a layer with a sliding window of {sliding_window}, which "
            "the torch backend does not compute: lower env.max_tokens to the window."
        )
    grouped = query.shape[1] != key.shape[1]
    sizes = [s.length for s in segments]
    rows = zip(segments, *(torch.split(x, sizes, dim=2) for x in (query, key, value)), strict=True)
    outputs = []
    for s, q, k, v in rows:
        mask = None
        if s.prefix:
            before = slice(s.prefix_start, s.prefix_start + s.prefix)
            k, v = (torch.cat([x[:, :, before], own], dim=2) for x, own in ((key, k), (value, v)))
            mask = _sees(s.prefix, s.length, query.device)
        outputs.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, dropout_p=dropout, enable_gqa=grouped
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2), None


@lru_cache(maxsize=256)
def _sees(prefix: int, own: int, device: torch.device) -> Tensor:
    """[own, prefix + own] bool: all of the prefix, and of its own tokens those up to itself."""
    return torch.ones(own, prefix + own, dtype=torch.bool, device=device).tril(prefix)


AttentionInterface.register(NAME, varlen_sdpa)
