"""Full tensors with Hugging Face names from the pieces of all ranks, one at a time, and pieces of full tensors.

stage 0, rank 0  [up: rows 0..]─┐
stage 0, rank 1  [up: rows n..]─┴─> every rank: model.layers.0.mlp.up_proj.weight, then the next
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.learner.backends.json_exchange import exchanged
from asyncrl.learner.backends.megatron.groups import Groups
from asyncrl.learner.backends.megatron.model import Decoder
from asyncrl.learner.backends.megatron.names import Layout, from_hf, placed, to_hf


class Pieces:
    """Conversion for all decoders of one layout. Its iterators are collective: every rank iterates to the end."""

    def __init__(self, decoder: Decoder, layout: Layout, groups: Groups) -> None:
        self._layout, self._tensor, self._stages = layout, groups.tensor, groups.stages
        self._device = next(decoder.parameters()).device
        mine = [(name, list(parameter.shape)) for name, parameter in decoder.named()]
        everyone = [mine] if groups.stages.size() == 1 else exchanged(mine, groups.stages, self._device)
        self._all: dict[str, tuple[int, tuple[int, ...]]] = {}
        for stage, named in enumerate(everyone):
            for name, shape in named:
                self._all.setdefault(name, (stage, tuple(shape)))  # a head that is tied to the embedding occurs twice

    def full(self, of: Callable[[str], Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """`of(name)`: this rank's piece, of `dtype`; called for each weight of this rank's stage, in the same order on
        all its ranks."""
        for name, (stage, shape) in self._all.items():
            mine = stage == self._stages.rank()
            piece = of(name).contiguous() if mine else torch.empty(shape, dtype=dtype, device=self._device)
            if self._stages.size() > 1:
                dist.broadcast(piece, group=self._stages, group_src=stage)
            pieces = [piece]
            if self._tensor.size() > 1 and placed(name)[1] != "whole":
                pieces = [torch.empty_like(piece) for _ in range(self._tensor.size())]
                dist.all_gather(pieces, piece, group=self._tensor)
            yield from to_hf(name, pieces, self._layout).items()

    def piece(self, name: str, get: Callable[[str], Tensor]) -> Tensor:
        """This rank's piece; `get` gives a full tensor by its Hugging Face name."""
        return from_hf(name, get, self._layout, self._tensor.rank(), self._tensor.size())
