"""Weights of several types and shapes."""

from __future__ import annotations

import torch


def model(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(50, 16, generator=g).bfloat16(),
        "large": torch.randn(2000, generator=g),
        "scalar": torch.tensor(float(seed)),
        "odd": torch.randint(0, 255, (5, 1), generator=g, dtype=torch.uint8),
        "empty": torch.zeros(0, 3),
        "transposed": torch.randn(6, 4, generator=g).t(),
    }


def alike(got: dict[str, torch.Tensor], sent: dict[str, torch.Tensor]) -> bool:
    return got.keys() == sent.keys() and all(
        torch.equal(got[name], sent[name]) and got[name].dtype == sent[name].dtype for name in sent
    )
