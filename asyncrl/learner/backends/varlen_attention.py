"""Causal attention over rows laid end to end, for any transformers model: no mask of T x T, no padding.

Transformers looks an attention up by name; importing this file registers `varlen_sdpa`. It does not depend on how a
transformers version detects packed rows from position ids, which goes silently wrong with caches and masks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

NAME = "varlen_sdpa"


def varlen_sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    row_lengths: tuple[int, ...],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, d], key and value [1, kv heads, T, d] -> [1, T, heads, d].

    A loop over rows: measured on CPU as fast as batches of rows of like length, at any length.
    """
    if attention_mask is not None:
        raise ValueError("varlen_sdpa takes no attention_mask: the rows' lengths say who sees whom")
    if sliding_window is not None and max(row_lengths) > sliding_window:
        raise ValueError(
            f"a row of {max(row_lengths)} tokens meets a layer with a sliding window of {sliding_window}, which "
            "the torch backend does not compute: lower env.max_tokens to the window."
        )
    grouped = query.shape[1] != key.shape[1]
    rows = zip(*(torch.split(x, list(row_lengths), dim=2) for x in (query, key, value)), strict=True)
    outputs = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=grouped)
        for q, k, v in rows
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


AttentionInterface.register(NAME, varlen_sdpa)
