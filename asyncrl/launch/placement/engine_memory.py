"""The memory of one engine on each of its GPUs: the share that it takes, and what it needs to serve one row. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asyncrl.config import Config
from asyncrl.config.rules.gpus import engine_gpus

VLLM_SHARE, SGLANG_SHARE = 0.9, 0.88
"""Shares of a GPU that the engines take by default."""
WORK = 1.5 * 2**30
"""An estimate of an engine's CUDA context, graphs and activations."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    taken: float
    """Bytes of each GPU that it takes at its start, whatever it needs."""
    needed: float
    """Bytes of each GPU for weights, work and one row of the greatest length."""
    rows: int
    """Rows of the greatest length that fit into its cache."""


def memory_of_engine(config: Config, model: Any, parameters: int, card: int) -> EngineMemory:
    """`model`: its transformers config. `card`: bytes of one GPU."""
    gpus = max(1, engine_gpus(config))
    size = 2 if config.model.dtype == "bfloat16" else 4
    weights = parameters * size / gpus
    row = config.env.max_tokens * bytes_of_token(model, size) / gpus
    taken = share_of(config) * card
    rows = int(max(0.0, taken - weights - WORK) // row)
    return EngineMemory(taken, weights + WORK + row, rows)


def share_of(config: Config) -> float:
    """The share of each GPU's memory that an engine takes; 0 where its options do not say."""
    options = config.actors.engine_options
    if config.actors.engine == "vllm":
        return float(options.get("gpu_memory", VLLM_SHARE))
    if config.actors.engine == "sglang":
        return float((options.get("args") or {}).get("mem_fraction_static", SGLANG_SHARE))
    return 0.0


def bytes_of_token(model: Any, size: int) -> int:
    """Bytes of one token in the cache of all layers."""
    text = model.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    d = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * int(text.num_hidden_layers) * int(heads) * int(d) * size
