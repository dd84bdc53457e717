"""Activation checkpointing of a decoder's layers: what the backward pass computes again.

full        everything in the layer
selective   everything but attention, whose result and log-sum-exp are kept: at long rows it is most of the
            arithmetic, and what is kept of it is as large as the layer's input
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts, noop_context_fn

Checkpointing = Literal["none", "selective", "full"]
KEPT = frozenset(
    (
        "torch_attn::_varlen_attn",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
    )
)
"""Operations whose results `selective` keeps."""


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation.name() in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


_selective = partial(create_selective_checkpoint_contexts, _policy)
CONTEXTS: Mapping[str, Callable[[], Any]] = {"full": noop_context_fn, "selective": _selective}


def options(chosen: Checkpointing) -> dict[str, Any]:
    """Keywords of `torch.utils.checkpoint.checkpoint`. Nothing in a layer is random, so no random state is kept."""
    return {"use_reentrant": False, "preserve_rng_state": False, "context_fn": CONTEXTS[chosen]}
