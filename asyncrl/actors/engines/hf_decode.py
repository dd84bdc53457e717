"""The same forward pass as `hf_forward.py`, written out for the Llama, Qwen2 and Qwen3 families.

For a model of a million parameters most of a decoding step is Python and kernel launches: with the projections of a
layer fused into one matrix each and the cache read in place, a step takes a quarter of the model's own forward.
A test holds the two to the same logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from asyncrl.actors.engines.hf_forward import KVCache, Rows, visible

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
    norm_q: torch.Tensor | None
    norm_k: torch.Tensor | None
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
        self._cos, self._sin = cos[0, :, None], sin[0, :, None]
        self.refresh()

    def refresh(self) -> None:
        with torch.inference_mode():
            self._layers = [_fuse(layer) for layer in self._model.model.layers]
            self._embed = self._model.get_input_embeddings().weight
            self._norm = self._model.model.norm.weight
            self._head = self._model.get_output_embeddings()

    @torch.inference_mode()
    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, rows: Rows, last: torch.Tensor, longest: int
    ) -> torch.Tensor:
        size, width = tokens.shape
        flat = positions.reshape(-1)
        cos, sin = self._cos[flat], self._sin[flat]
        seen = visible(positions, longest)
        index = self._cache.index[rows][:, None]
        q_heads, qk_heads = self._heads, self._heads + self._kv_heads
        x = F.embedding(tokens.reshape(-1), self._embed)
        for i, layer in enumerate(self._layers):
            h = _linear(self._rms(x, layer.norm_in), layer.qkv, layer.qkv_bias)
            h = h.view(size * width, qk_heads + self._kv_heads, self._dim)
            qk = h[:, :qk_heads]
            if layer.norm_q is not None and layer.norm_k is not None:
                q, k = h[:, :q_heads], h[:, q_heads:qk_heads]
                qk = torch.cat((self._rms(q, layer.norm_q), self._rms(k, layer.norm_k)), 1)
            a, b = qk.chunk(2, -1)
            qk = qk * cos + torch.cat((-b, a), -1) * sin
            keys, values = self._cache.k[i], self._cache.v[i]
            keys[index, :, positions] = qk[:, q_heads:].view(size, width, self._kv_heads, self._dim)
            values[index, :, positions] = h[:, qk_heads:].reshape(size, width, self._kv_heads, self._dim)
            y = self._attend(qk[:, :q_heads], keys[rows, :, :longest], values[rows, :, :longest], seen)
            x = _linear(y, layer.out, layer.out_bias, x)
            gate, up = _linear(self._rms(x, layer.norm_mlp), layer.gate_up, layer.gate_up_bias).chunk(2, -1)
            x = _linear(F.silu(gate) * up, layer.down, layer.down_bias, x)
        x = x.view(size, width, -1)[torch.arange(size), last]
        logits: torch.Tensor = self._head(self._rms(x, self._norm))
        return logits.float()

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """q [B * L, heads, dim], k and v [B, kv_heads, T, dim], seen [B, 1, L, T]; returns [B * L, heads * dim]."""
        size, _, width, _ = seen.shape
        if width == 1:  # the query heads of one key head stand in for positions: nothing is repeated
            q = q.reshape(size, self._kv_heads, -1, self._dim)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).reshape(size, -1)
        q = q.view(size, width, self._heads, self._dim).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return y.transpose(1, 2).reshape(size * width, -1)

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float32:
            return F.rms_norm(x, weight.shape, weight, self._eps)
        wide = x.float()  # as the models do it: normalised in float32, scaled in the model's format
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)).to(x.dtype)


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight + bias + residual."""
    y = x @ weight if residual is None else torch.addmm(residual, x, weight)
    return y if bias is None else y + bias


def _fuse(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, qkv_bias = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up, gate_up_bias = _joined(mlp.gate_proj, mlp.up_proj)
    out, out_bias = _joined(attention.o_proj)
    down, down_bias = _joined(mlp.down_proj)
    norm_q, norm_k = (getattr(getattr(attention, name, None), "weight", None) for name in ("q_norm", "k_norm"))
    return _Layer(
        layer.input_layernorm.weight, qkv, qkv_bias, norm_q, norm_k, out, out_bias,
        layer.post_attention_layernorm.weight, gate_up, gate_up_bias, down, down_bias,
    )  # fmt: skip


def _joined(*projections: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight = torch.cat([p.weight for p in projections]).t().contiguous()
    biases = [p.bias for p in projections]
    return weight, None if biases[0] is None else torch.cat(biases)
