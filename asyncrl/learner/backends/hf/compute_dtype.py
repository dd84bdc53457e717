"""Computes a model of float32 weights in another dtype: each layer casts its weights when it runs.

What a layer computes and keeps for its backward pass is of that dtype, as engines and `fsdp2` compute; the gradient of
a cast goes back in float32 to the weight, where micro-batches add up. Under activation checkpointing the cast weights
of one layer exist at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class ComputeDtype:
    """The dtype of a model's passes; float32 computes with the weights themselves, bit for bit."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def compute_in(model: nn.Module, layers: Sequence[nn.Module], chosen: ComputeDtype) -> None:
    """Has `layers`, and the modules of `model` outside them that hold weights, compute in `chosen.dtype`."""
    inside = {id(part) for layer in layers for part in layer.modules()}
    for module in model.modules():
        if id(module) not in inside and next(module.parameters(recurse=False), None) is not None:
            Cast(module, chosen)
    for layer in layers:
        Cast(layer, chosen)


class Cast:
    """Stands in for the `forward` of a module."""

    def __init__(self, module: nn.Module, chosen: ComputeDtype) -> None:
        self._module, self._chosen = module, chosen
        self._forward = module.forward
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dtype = self._chosen.dtype
        if dtype == torch.float32:
            return self._forward(*args, **kwargs)
        if type(self._module) is nn.Embedding:  # the rows that are looked up, not the whole table
            return self._forward(*args, **kwargs).to(dtype)
        held = [
            (part._parameters, name, weight)
            for part in self._module.modules()
            for name, weight in part._parameters.items()
            if weight is not None and weight.dtype == torch.float32
        ]
        casts: dict[int, Any] = {id(weight): weight.to(dtype) for _, _, weight in held}
        try:
            for weights, name, weight in held:
                weights[name] = casts[id(weight)]
            return self._forward(*args, **kwargs)
        finally:
            for weights, name, weight in held:
                weights[name] = weight

    def compile(self) -> None:
        """Compiles what the module computes from its weights, whatever their dtype, and any number of tokens."""
        compiled = torch.compile(self._forward, dynamic=True)

        def with_fixed_weights(*args: Any, **kwargs: Any) -> Any:
            for weight in self._module.parameters():
                torch._dynamo.mark_static(weight)
            return compiled(*args, **kwargs)

        self._forward = with_fixed_weights
