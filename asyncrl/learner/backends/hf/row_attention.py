"""Causal attention of the rows of a pass, whose last tokens are computed and whose first may be shared.

    in_one_call   torch's varlen_attn, on a GPU: one call for all rows, no mask, no plan for each length
    by_rows       a loop over rows in torch's scaled_dot_product_attention: the reference, on every device

Both have the same signature. varlen_attn aligns its causal mask with the last query and the last key, so a query of a
row attends to the row's shared tokens and to its own up to itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from asyncrl.learner.backends.shared_prefixes import Segment

ROUND = 64
"""One mask is built for the longest row and the longest prefix, both rounded up to a multiple of this; the mask of each
row is a view of it."""
MASK_BYTES = 64 << 20
"""Largest mask: a row that shares a prefix and would need a larger one is computed in several blocks of queries."""
HALF = (torch.float16, torch.bfloat16)
WIDEST_HEAD = 256
AMPERE = (8, 0)
"""The oldest GPUs that flash attention runs on, by compute capability."""
Kernel = Callable[..., Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The layout of the rows of a pass: one object, so that torch.compile sees the same arguments in every pass."""

    segments: Sequence[Segment]
    """The tokens that each row computes itself, and how many it shares with earlier rows"""
    seen: Tensor | None
    """Indices of the tokens that the rows attend to, one row after another; None: no row shares any"""
    own_ends: Tensor
    """[rows + 1] int32, 0 first: where each row's computed tokens end"""
    seen_ends: Tensor
    """[rows + 1] int32, 0 first: where the tokens that each row attends to end"""
    longest_own: int
    longest: int
    kernel: Kernel | None = None
    """Computes attention; None: the one that suits the tensors"""


def layout_of(
    segments: Sequence[Segment], seen: Tensor | None, *, ends: Tensor | None = None, kernel: Kernel | None = None
) -> Layout:
    """`seen` and `ends` on the device of the pass; `ends` of `ends_of(segments)`, None: on the CPU."""
    ends = ends_of(segments) if ends is None else ends
    own_ends, seen_ends = ends.to(torch.int32).unbind()
    longest = max(s.prefix + s.length for s in segments)
    return Layout(segments, seen, own_ends, seen_ends, max(s.length for s in segments), longest, kernel)


def ends_of(segments: Sequence[Segment]) -> Tensor:
    """[2, rows + 1] int64 on the CPU: `own_ends` and `seen_ends` of a layout."""
    numbers = torch.tensor([[0, *(s.length for s in segments)], [0, *(s.prefix + s.length for s in segments)]])
    return numbers.cumsum(1)


def attend(query: Tensor, key: Tensor, value: Tensor, layout: Layout, *, scale: float | None = None) -> Tensor:
    """query [U, heads, d], key and value [U, kv heads, d] of the computed tokens -> [U, heads, d].

    A row that shares its beginning with others reads the keys and values that were computed there
    (shared_prefixes.py). `scale`: of the scores, None: 1 / sqrt(d).
    """
    kernel = layout.kernel
    if kernel is None:
        kernel = in_one_call if query.is_cuda and fits_one_call(query) else by_rows
    return kernel(query, key, value, layout, scale=scale)


def fits_one_call(query: Tensor) -> bool:
    """Whether `in_one_call` computes these queries of a GPU."""
    capability = torch.cuda.get_device_capability(query.device)
    return varlen() is not None and flash_takes(query.dtype, query.shape[-1], capability)


def flash_takes(dtype: torch.dtype, head: int, capability: tuple[int, int]) -> bool:
    """Whether flash attention computes heads of this type and width."""
    return dtype in HALF and head % 8 == 0 and head <= WIDEST_HEAD and capability >= AMPERE


def varlen() -> Kernel | None:
    """torch's varlen_attn; None where torch has none, or one that knows no causal window (before 2.11)."""
    try:
        from torch.nn.attention import varlen as module
    except ImportError:
        return None
    call = cast(Kernel, module.varlen_attn)  # a tensor alone, as no log-sum-exp is asked for
    return call if "window_size" in _keywords(call) else None


@lru_cache(maxsize=8)
def _keywords(call: Kernel) -> frozenset[str]:
    return frozenset(inspect.signature(call).parameters)


def in_one_call(query: Tensor, key: Tensor, value: Tensor, layout: Layout, *, scale: float | None = None) -> Tensor:
    """`attend` by varlen_attn, whose kernels take float16 and bfloat16 on a GPU. Raises RuntimeError without it."""
    call = varlen()
    if call is None:
        raise RuntimeError(f"torch {torch.__version__} has no varlen_attn with a causal window: use by_rows.")
    key, value = _seen(key, layout), _seen(value, layout)
    shared: dict[str, Any] = {}
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in _keywords(call):
            shared["enable_gqa"] = True
        else:  # torch 2.11
            key, value = _own_heads(query, key, value)
    return call(
        query, key, value, layout.own_ends, layout.seen_ends, layout.longest_own, layout.longest,
        scale=scale, window_size=(-1, 0), **shared,
    )  # fmt: skip


def by_rows(query: Tensor, key: Tensor, value: Tensor, layout: Layout, *, scale: float | None = None) -> Tensor:
    """`attend` row by row: measured on a CPU as fast as batches of rows of similar length, at any length."""
    key, value = _seen(key, layout), _seen(value, layout)
    masks = _Masks([s for s in layout.segments if s.prefix], query)
    queries = torch.split(query, [s.length for s in layout.segments])
    keys, values = (torch.split(x, [s.prefix + s.length for s in layout.segments]) for x in (key, value))
    outputs = []
    with _without_plans(query):
        for s, q, k, v in zip(layout.segments, queries, keys, values, strict=True):
            for own, until, mask in masks.blocks(s):
                outputs.append(_attend(q[own], k[:until], v[:until], mask, scale))
    return torch.cat(outputs)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """[n, heads, d], [m, kv heads, d] twice -> [n, heads, d]; without a mask n equals m."""
    if query.device.type != "cpu" and (mask is not None or query.dtype not in HALF):
        # These kernels of a GPU share no heads. Without them torch makes all scores of every head.
        key, value = _own_heads(query, key, value)
        mask = None if mask is None else mask.contiguous()
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return out[0].transpose(0, 1)


def _own_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value [m, kv heads, d] with a copy for each head of the query."""
    copies = query.shape[1] // key.shape[1]
    return key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)


def _without_plans(query: Tensor) -> AbstractContextManager[object]:
    """Of a GPU's kernels, those that need no plan for each shape: cuDNN builds one for every length of a row, which
    takes longer than attention itself."""
    if query.device.type == "cpu":
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def _seen(x: Tensor, layout: Layout) -> Tensor:
    """[U, kv heads, d] -> [tokens that the rows attend to, kv heads, d]. An embedding, whose backward is fast and
    deterministic."""
    if layout.seen is None:
        return x
    total, heads, d = x.shape
    return F.embedding(layout.seen, x.reshape(total, heads * d)).view(-1, heads, d)


class _Masks:
    """The blocks of queries of the rows that share a prefix, and their masks, views of one that is kept."""

    def __init__(self, sharing: Sequence[Segment], like: Tensor) -> None:
        if not sharing:
            return
        longest = _rounded(max(s.prefix + s.length for s in sharing))
        # Its columns are those before a block and the block's own: at most twice the longest row.
        most = max(ROUND, MASK_BYTES // (like.dtype.itemsize * 2 * longest) // ROUND * ROUND)
        self._rows = min(most, _rounded(max(s.length for s in sharing)))
        # The last block of a row has the most keys before it.
        self._before = _rounded(max(s.prefix + (s.length - 1) // self._rows * self._rows for s in sharing))
        self._mask = _causal(self._rows, self._before, like.dtype, like.device)

    def blocks(self, s: Segment) -> Iterator[tuple[slice, int, Tensor | None]]:
        """The queries of a block, how many of the row's keys they attend to, and their mask."""
        if not s.prefix:
            yield slice(None), s.length, None
            return
        for start in range(0, s.length, self._rows):
            end = min(s.length, start + self._rows)
            before, own = s.prefix + start, end - start
            yield slice(start, end), s.prefix + end, self._mask[:own, self._before - before : self._before + own]


def _rounded(n: int) -> int:
    return -(-n // ROUND) * ROUND


@lru_cache(maxsize=1)
def _causal(own: int, before: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[own, before + own]: minus infinity behind the diagonal that follows `before`."""
    return torch.full((own, before + own), -torch.inf, dtype=dtype, device=device).triu(before + 1)
