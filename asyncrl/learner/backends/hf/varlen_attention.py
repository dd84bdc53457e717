"""Causal attention over rows laid end to end, for any transformers model: no mask of T x T, no padding.

Transformers looks an attention up by name; importing this file registers `varlen_sdpa`. It does not depend on how a
transformers version detects packed rows from position ids, which goes silently wrong with caches and masks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from asyncrl.learner.backends.hf.row_attention import Layout, attend

NAME = "varlen_sdpa"


def packed(
    module: torch.nn.Module,
    *states: Tensor | None,
    layout: Layout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """`attend` as transformers calls it: query [1, heads, U, d], key and value [1, kv heads, U, d] and mask, and what
    the model was called with -> [1, U, heads, d]."""
    query, key, value, mask = states
    assert query is not None
    assert key is not None
    assert value is not None
    if mask is not None:
        raise ValueError("varlen_sdpa takes no attention mask: the segments say which tokens a row attends to")
    if dropout:
        raise ValueError(f"varlen_sdpa computes no dropout, and a layer asks for {dropout}: the scorer must not train")
    if sliding_window is not None and layout.longest > sliding_window:
        raise ValueError(
            f"a row of {layout.longest} tokens meets a layer with a sliding window of {sliding_window}, which "
            "the torch backend does not compute: lower env.max_tokens to the window."
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(q, k, v, layout, scale=scaling)[None], None


AttentionInterface.register(NAME, packed)
