"""Weights gathered in buckets against one tensor at a time: the same bits, in few collectives."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.learner.backends.hf import gathering
from asyncrl.learner.backends.hf.fsdp2 import Fsdp2Backend, full
from asyncrl.learner.backends.hf.lora import weights
from tests.learner.kept_ranks import on_kept_ranks
from tests.learner.tiny import tiny_config, tiny_model


class Collectives(TorchDispatchMode):
    """Counts what ranks do together."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "gather" in func.name():
            self.calls[func.name()] += 1
        return func(*args, **(kwargs or {}))


def published(dtype: str, learner: dict[str, Any], limit: int) -> dict[str, Any]:
    """Weights as they are published, as they are one by one, and the collectives of each way."""
    config = tiny_config(**learner)
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    backend = Fsdp2Backend(config, tiny_model("qwen2"), device="cpu")
    with torch.no_grad():
        for number, p in enumerate(backend._scorer.parameters()):
            if p.requires_grad:  # adapters that add something
                p.add_(0.01 * (1 + number % 7))
    limited = gathering.BUCKET_BYTES
    gathering.BUCKET_BYTES = limit
    try:
        with Collectives() as collectives:
            found = {name: tensor.clone() for name, tensor in backend.weights()}
    finally:
        gathering.BUCKET_BYTES = limited
    half = getattr(torch, dtype)
    alone: dict[str, Tensor] = {w.name: full(w.merged(lambda x: x).to(half)) for w in weights(backend._model)}
    return {"found": found, "alone": alone, "calls": collectives.calls}


CASES = [
    (2, "float32", {}),
    (3, "bfloat16", {}),
    (3, "bfloat16", {"lora": {"r": 2}}),
    (1, "float32", {"lora": {"r": 2}}),
]


@pytest.mark.parametrize(("ranks", "dtype", "learner"), CASES)
@pytest.mark.parametrize("limit", [1 << 14, 1 << 30], ids=["several", "one"])
def test_the_same_bits_in_few_collectives(ranks: int, dtype: str, learner: dict[str, Any], limit: int) -> None:
    first, *others = on_kept_ranks(ranks, published, dtype, learner, limit)
    assert list(first["found"]) == list(first["alone"]), "in the same order"
    for name, tensor in first["alone"].items():
        assert torch.equal(first["found"][name], tensor), name
        assert first["found"][name].is_contiguous()
    for other in others:
        assert other["found"] == {}
        assert other["calls"] == first["calls"]
    sizes = [x.nbytes for x in first["alone"].values()]
    buckets = len(list(gathering.buckets(sizes, limit)))
    adapters = 1 if learner else 0
    assert sum(first["calls"].values()) == (0 if ranks == 1 else buckets + adapters)
    assert buckets == 1 if limit == 1 << 30 else 1 < buckets < len(sizes) / 2
