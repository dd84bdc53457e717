"""Weights of Qwen3, Qwen2 and Llama under Megatron-core's names and under Hugging Face's, at any tensor parallelism.

Megatron keeps queries, keys and values as one matrix, group by group, and the gate above the up projection, rank by
rank. A piece is the part that one tensor-parallel rank holds. Moments and gradients have their weight's shape, so the
same functions convert them.

    decoder.layers.3.mlp.linear_fc1.weight  [gate 0; up 0] [gate 1; up 1]  <->  gate_proj [gate 0; gate 1], up_proj
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["whole", "rows", "columns", "qkv", "stacked"]
"""The way that ranks share a weight. whole: each has all of it. rows, columns: each has an equal share of them."""

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_QKV = ("self_attn.q_proj.{}", "self_attn.k_proj.{}", "self_attn.v_proj.{}")
_IN_LAYER: dict[str, tuple[tuple[str, ...], Kind]] = {
    "input_layernorm.weight": (("input_layernorm.weight",), "whole"),
    "self_attention.linear_qkv.weight": (tuple(n.format("weight") for n in _QKV), "qkv"),
    "self_attention.linear_qkv.bias": (tuple(n.format("bias") for n in _QKV), "qkv"),
    "self_attention.q_layernorm.weight": (("self_attn.q_norm.weight",), "whole"),
    "self_attention.k_layernorm.weight": (("self_attn.k_norm.weight",), "whole"),
    "self_attention.linear_proj.weight": (("self_attn.o_proj.weight",), "columns"),
    "pre_mlp_layernorm.weight": (("post_attention_layernorm.weight",), "whole"),
    "mlp.linear_fc1.weight": (("mlp.gate_proj.weight", "mlp.up_proj.weight"), "stacked"),
    "mlp.linear_fc2.weight": (("mlp.down_proj.weight",), "columns"),
}
_TOP: dict[str, tuple[tuple[str, ...], Kind]] = {
    EMBEDDING: (("model.embed_tokens.weight",), "rows"),
    "decoder.final_layernorm.weight": (("model.norm.weight",), "whole"),
    HEAD: (("lm_head.weight",), "rows"),
}


@dataclass(frozen=True, slots=True)
class Layout:
    """Dimensions that the shapes of weights do not tell."""

    heads: int
    groups: int
    """Groups of heads that share keys and values"""
    head_dim: int
    vocabulary: int
    """Real tokens; the rows after them, which pad the last rank, are zero"""


def in_layer(name: str) -> tuple[int, str] | None:
    """The layer of a weight and the weight's name in it, or None outside the layers."""
    match = _LAYER.fullmatch(name)
    return None if match is None else (int(match[1]), match[2])


def placed(name: str) -> tuple[tuple[str, ...], Kind]:
    """The Hugging Face names of the weight that Megatron calls `name`, and how ranks share it."""
    if place := in_layer(name):
        names, kind = _IN_LAYER[place[1]]
        return tuple(f"model.layers.{place[0]}.{n}" for n in names), kind
    return _TOP[name]


def to_hf(name: str, pieces: Sequence[Tensor], layout: Layout) -> dict[str, Tensor]:
    """Weights by Hugging Face name, from the `pieces` of all tensor-parallel ranks, in order; one, if it is `whole`."""
    names, kind = placed(name)
    if kind == "whole":
        return {names[0]: pieces[0]}
    if kind == "columns":
        return {names[0]: torch.cat(list(pieces), 1)}
    if kind == "stacked":
        halves = [piece.chunk(2) for piece in pieces]
        return {n: torch.cat([half[i] for half in halves]) for i, n in enumerate(names)}
    whole = torch.cat(list(pieces))
    if kind == "rows":
        return {names[0]: whole[: layout.vocabulary]}
    group_rows = _rows_of_group(layout)
    parts = torch.split(whole.view(layout.groups, sum(group_rows), *whole.shape[1:]), group_rows, dim=1)
    return {n: part.reshape(-1, *whole.shape[1:]) for n, part in zip(names, parts, strict=True)}


def from_hf(name: str, get: Callable[[str], Tensor], layout: Layout, rank: int, size: int) -> Tensor:
    """The piece of rank `rank` of `size`; `get` gives a whole tensor by its Hugging Face name."""
    names, kind = placed(name)
    wholes = [get(n) for n in names]
    if kind == "whole":
        return wholes[0]
    if kind == "columns":
        return wholes[0].chunk(size, dim=1)[rank]
    if kind == "stacked":
        return torch.cat([whole.chunk(size)[rank] for whole in wholes])
    if kind == "rows":
        rows = -(-layout.vocabulary // size)
        piece = wholes[0][rank * rows : (rank + 1) * rows]
        return torch.cat([piece, piece.new_zeros(rows - len(piece), *piece.shape[1:])])
    rest = wholes[0].shape[1:]
    parts = [w.view(layout.groups, n, *rest) for w, n in zip(wholes, _rows_of_group(layout), strict=True)]
    return torch.cat(parts, dim=1).chunk(size)[rank].reshape(-1, *rest)


def _rows_of_group(layout: Layout) -> list[int]:
    """Rows of the queries, keys and values of one group of heads."""
    return [layout.heads // layout.groups * layout.head_dim, layout.head_dim, layout.head_dim]
