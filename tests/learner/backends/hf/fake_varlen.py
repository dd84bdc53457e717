"""Fakes of torch's varlen_attn with the signatures of two releases: they note their calls and compute on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def eager(q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, scale: float | None) -> Tensor:
    """What varlen_attn is documented to compute with window_size (-1, 0), in plain operations."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    copies = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
    rows = []
    for (a, b), (c, d) in zip(pairwise(ends_q.tolist()), pairwise(ends_k.tolist()), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q[a:b], k[c:d]) * scale
        # Bottom right: the last query sees the last key.
        hidden = torch.ones(b - a, d - c, dtype=torch.bool).triu(d - c - (b - a) + 1)
        rows.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v[c:d]))
    return torch.cat(rows)


@dataclass
class FakeVarlen:
    """Stands in for `torch.nn.attention.varlen.varlen_attn`."""

    asked: list[dict[str, Any]] = field(default_factory=list)

    def note(self, q: Tensor, k: Tensor, ends_q: Tensor, ends_k: Tensor, max_q: int, max_k: int, **given: Any) -> None:
        assert ends_q.dtype == ends_k.dtype == torch.int32
        assert max_q == int(ends_q.diff().max())
        assert max_k == int(ends_k.diff().max())
        assert q.stride(-1) == k.stride(-1) == 1
        self.asked.append({"query": tuple(q.shape), "key": tuple(k.shape), "rows": len(ends_q) - 1} | given)

    def of_2_11(  # noqa: PLR0913 - torch's
        self, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
        *, return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:  # fmt: skip
        assert query.shape[1] == key.shape[1] == value.shape[1], "2.11 documents no shared heads"
        self.note(query, key, cu_seq_q, cu_seq_k, max_q, max_k, window_size=window_size, scale=scale)
        return eager(query, key, value, cu_seq_q, cu_seq_k, scale)

    def of_2_13(  # noqa: PLR0913 - torch's
        self, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int,
        max_k: int, *, return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False, seqused_k: Tensor | None = None, block_table: Tensor | None = None,
        num_splits: int | None = None,
    ) -> Tensor:  # fmt: skip
        assert cu_seq_k is not None
        assert enable_gqa or query.shape[1] == key.shape[1]
        self.note(
            query, key, cu_seq_q, cu_seq_k, max_q, max_k, window_size=window_size, scale=scale, enable_gqa=enable_gqa
        )
        return eager(query, key, value, cu_seq_q, cu_seq_k, scale)
