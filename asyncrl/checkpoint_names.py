"""The names under which a model's weights stand in its checkpoint, where transformers names them otherwise in memory.

    in memory    mlp.experts.gate_up_proj [E, 2 I, H]      all experts of a layer in one tensor
    checkpoint   mlp.experts.0.gate_proj.weight [I, H], mlp.experts.0.up_proj.weight [I, H], mlp.experts.1. ...

Weights are published and exported as the checkpoint has them: what engines load, and what other programs read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a tensor of the checkpoint lies in the model."""

    name: str
    """Name of the model's tensor."""
    shape: tuple[int, ...]
    index: Tensor | None = None
    """Numbers of its elements in that tensor, laid flat; None: it is the whole tensor."""


def as_checkpoint(model: PreTrainedModel, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors as the checkpoint has them, one of the model's at a time."""
    if not _converts(model):
        yield from named
        return
    for name, tensor in named:
        yield from _split(model, name, tensor)


def places(model: PreTrainedModel) -> dict[str, Place]:
    """The place of every tensor of the checkpoint, by its name there; tied ones under each of their names."""
    import torch

    found = {}
    converts = _converts(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not converts:
            found[name] = Place(name, tuple(tensor.shape))
            continue
        numbers = torch.arange(tensor.numel()).view(tensor.shape)
        for own, index in _split(model, name, numbers):
            whole = index.shape == numbers.shape
            found[own] = Place(name, tuple(index.shape), None if whole else index.flatten())
    return found


def put(state: dict[str, Tensor], place: Place, tensor: Tensor) -> None:
    """Writes a tensor of the checkpoint into the model's, which `state` holds by name."""
    target = state[place.name]
    if place.index is None:
        target.copy_(tensor)
    else:
        target.view(-1).index_copy_(0, place.index, tensor.flatten().to(target.dtype))


def _converts(model: PreTrainedModel) -> bool:
    """Whether transformers renames or joins this family's tensors when it loads a checkpoint."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    conversions = getattr(model, "_weight_conversions", None)
    return bool(get_model_conversion_mapping(model, add_legacy=False) if conversions is None else conversions)


def _split(model: PreTrainedModel, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    from transformers.core_model_loading import revert_weight_conversion

    split: dict[str, Tensor] = revert_weight_conversion(model, {name: tensor})
    return split.items()
