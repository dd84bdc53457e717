"""The forward pass of `forward.py`, written out for the Llama, Qwen2 and Qwen3 families.

For a model of a million parameters, Python and kernel launches dominate a decoding step. With fused projections and the
cache read in place, a step takes a quarter of the time of the model's own forward. A test checks that the logits agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from asyncrl.actors.engines.hf.forward import KVCache, Part, attention_mask

FAMILIES = ("llama", "qwen2", "qwen3")


def supported(config: Any) -> bool:
    """Whether `FusedForward` computes what a model of this config computes."""
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return config.model_type in FAMILIES and config.hidden_act == "silu" and rope in ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights [in, out] and biases [out] of one layer; None where the family has none."""

    norm_in: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    norm_qk: torch.Tensor | None
    """[heads + kv_heads, dim]"""
    out: torch.Tensor
    out_bias: torch.Tensor | None
    norm_mlp: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


class FusedForward:
    def __init__(self, model: Any, cache: KVCache) -> None:
        c = model.config
        self._model, self._cache = model, cache
        self._eps: float = c.rms_norm_eps
        self._heads, self._kv_heads, self._dim = c.num_attention_heads, c.num_key_value_heads, cache.k.shape[-1]
        with torch.inference_mode():
            positions = torch.arange(cache.scratch + 1)[None]
            cos, sin = model.model.rotary_emb(torch.zeros(1, dtype=model.dtype), positions)
        # Both halves of a head rotate by the same angles.
        self._cos, self._sin = (x[0, :, None, : self._dim // 2].contiguous() for x in (cos, sin))
        self.refresh()

    def refresh(self) -> None:
        with torch.inference_mode():
            self._layers = [_fuse(layer, self._heads, self._kv_heads) for layer in self._model.model.layers]
            self._embed = self._model.get_input_embeddings().weight
            self._norm = self._model.model.norm.weight
            self._head = self._model.get_output_embeddings()

    @torch.inference_mode()
    def __call__(self, parts: Sequence[Part]) -> torch.Tensor:
        """Logits [B of all parts, V] float32. Attention runs part by part, all else over the N tokens at once."""
        tokens, positions = (torch.cat([x.reshape(-1) for x in xs]) for xs in _columns(parts))
        slots = torch.cat([self._cache.index[p.rows].repeat_interleave(p.tokens.shape[1]) for p in parts])
        place = slots * (self._cache.scratch + 1) + positions
        masks = [attention_mask(p, self._embed.dtype) for p in parts]
        sizes = [p.tokens.numel() for p in parts]
        cos, sin = self._cos[positions], self._sin[positions]
        x = F.embedding(tokens, self._embed)
        for i, layer in enumerate(self._layers):
            h = _linear(self._rms(x, layer.norm_in), layer.qkv, layer.qkv_bias).view(len(tokens), -1, self._dim)
            self._rotate(h[:, : self._heads + self._kv_heads], layer.norm_qk, cos, sin)
            # The keys and values of a token are adjacent in `h` and in the cache: one copy.
            self._cache.kv[i].flatten(2).flatten(0, 1).index_copy_(0, place, h[:, self._heads :].flatten(1))
            keys, values = self._cache.k[i], self._cache.v[i]
            y = [
                self._attend(own, keys[p.rows, :, : p.longest], values[p.rows, :, : p.longest], mask)
                for own, p, mask in zip(h[:, : self._heads].split_with_sizes(sizes), parts, masks, strict=True)
            ]
            x = _linear(torch.cat(y) if len(y) > 1 else y[0], layer.out, layer.out_bias, x)
            gate, up = _linear(self._rms(x, layer.norm_mlp), layer.gate_up, layer.gate_up_bias).chunk(2, -1)
            x = _linear(F.silu(gate).mul_(up), layer.down, layer.down_bias, x)
        x = x[_last(parts)]
        logits: torch.Tensor = self._head(self._rms(x, self._norm))
        return logits.float()

    def _rotate(self, qk: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Normalise queries and keys [N, heads + kv_heads, dim] and rotate them to their positions, in place."""
        # A copy, since `out=` writes into `qk` while `a` and `b` are read.
        a, b = (qk.clone() if weight is None else self._rms(qk, weight)).chunk(2, -1)
        left, right = qk.chunk(2, -1)
        torch.mul(a, cos, out=left).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=right).addcmul_(a, sin)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """q [B * L, heads, dim], k and v [B, kv_heads, T, dim], mask [B, 1, L, T]; returns [B * L, heads * dim]."""
        size, _, width, _ = mask.shape
        if width == 1:  # query heads of one key head take the place of positions, so that keys need no repetition
            q = q.reshape(size, self._kv_heads, -1, self._dim)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).reshape(size, -1)
        q = q.view(size, width, self._heads, self._dim).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return y.transpose(1, 2).reshape(size * width, -1)

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float32:
            return F.rms_norm(x, x.shape[-1:], None, self._eps).mul_(weight)
        wide = x.float()  # like the models: normalised in float32, scaled in the model's dtype
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)).to(x.dtype)


def _columns(parts: Sequence[Part]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [p.tokens for p in parts], [p.positions for p in parts]


def _last(parts: Sequence[Part]) -> torch.Tensor:
    """[B of all parts]: the index of each sequence's `last` column in the flat tokens."""
    starts, offset = [], 0
    for p in parts:
        size, width = p.tokens.shape
        starts.append(offset + torch.arange(size) * width + p.last)
        offset += size * width
    return torch.cat(starts)


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight + bias + residual; overwrites `residual`."""
    y = x @ weight if residual is None else residual.addmm_(x, weight)
    return y if bias is None else y.add_(bias)


def _fuse(layer: Any, heads: int, kv_heads: int) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, qkv_bias = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up, gate_up_bias = _joined(mlp.gate_proj, mlp.up_proj)
    out, out_bias = _joined(attention.o_proj)
    down, down_bias = _joined(mlp.down_proj)
    norm_q, norm_k = (getattr(getattr(attention, name, None), "weight", None) for name in ("q_norm", "k_norm"))
    norm_qk = None
    if norm_q is not None and norm_k is not None:
        norm_qk = torch.cat((norm_q.expand(heads, -1), norm_k.expand(kv_heads, -1)))
    return _Layer(
        layer.input_layernorm.weight, qkv, qkv_bias, norm_qk, out, out_bias,
        layer.post_attention_layernorm.weight, gate_up, gate_up_bias, down, down_bias,
    )  # fmt: skip


def _joined(*projections: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight = torch.cat([p.weight for p in projections]).t().contiguous()
    biases = [p.bias for p in projections]
    return weight, None if biases[0] is None else torch.cat(biases)
