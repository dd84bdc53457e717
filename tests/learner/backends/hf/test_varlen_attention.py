"""What attention over packed rows asks of torch where there is a GPU. Meta tensors stand for it: nothing computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl.learner.backends.hf.varlen_attention import Layout, for_fused_kernels, varlen_sdpa
from asyncrl.learner.backends.shared_prefixes import Segment

SEGMENTS = [Segment(0, 20, 0), Segment(20, 7, 13)]
SEEN = torch.cat([torch.arange(20), torch.arange(13), torch.arange(20, 27)])


def states(device: str) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(1, heads, 27, 8, device=device) for heads in (4, 2, 2))  # type: ignore[return-value]


def test_fused_kernels_are_asked_for_what_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, Tensor | None, bool]] = []
    attend = F.scaled_dot_product_attention

    def noted(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, enable_gqa: bool, **given: Any) -> Tensor:
        asked.append((k.shape[1], attn_mask, enable_gqa))
        return attend(q, k, v, attn_mask=attn_mask, enable_gqa=enable_gqa, **given)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    query, key, value = states("meta")
    varlen_sdpa(query, key, value, Layout(SEGMENTS, SEEN.to("meta")))
    assert (asked[0][0], asked[0][2]) == (2, True), "heads are shared where there is no mask"
    heads, mask, shared = asked[1]
    assert mask is not None
    assert (heads, shared) == (4, False)
    assert (mask.is_contiguous(), mask.storage_offset()) == (True, 0)


def test_heads_of_their_own_give_what_shared_ones_give() -> None:
    query, key, value = states("cpu")
    mask = torch.full((27, 30), -torch.inf).triu(1)[:, :27]
    shared = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    own = F.scaled_dot_product_attention(query, *for_fused_kernels(query, key, value, mask))
    torch.testing.assert_close(own, shared)
