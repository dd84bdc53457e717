"""The shard of each parameter that one rank's optimizer updates, and the state that it keeps for it.

Under a distributed optimizer the ranks that compute other micro-batches update the rest of the same piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from asyncrl.learner.backends.megatron.model import Decoder

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Shard:
    name: str
    """Megatron's name in a model of one stage"""
    parameter: Tensor
    """This rank's piece"""
    main: Tensor | None
    """float32, elements `start` to `end` of the flat piece; None: other ranks update all of it"""
    start: int
    end: int


class Shards:
    """The shards of all parameters of this rank's stage."""

    def __init__(self, decoder: Decoder, optimizer: Any, data: dist.ProcessGroup) -> None:
        """`optimizer`: Megatron's wrapper of torch's AdamW."""
        self._optimizer, self._data = optimizer, data
        self._all = {name: self._shard(name, parameter) for name, parameter in decoder.named()}

    def __iter__(self) -> Iterator[Shard]:
        return iter(self._all.values())

    def state(self, shard: Shard) -> dict[str, Tensor]:
        """Empty before the first update, and where `main` is None."""
        return {} if shard.main is None else self._optimizer.optimizer.state.get(shard.main, {})

    def set_state(self, shard: Shard, state: dict[str, Tensor]) -> None:
        self._optimizer.optimizer.state[shard.main] = state

    def step(self) -> int:
        """Updates so far."""
        steps = [int(state["step"]) for shard in self if (state := self.state(shard))]
        return max(steps, default=0)

    def gather(self, of: Callable[[Shard], Tensor | None]) -> Callable[[str], Tensor]:
        """The float32 piece of a name for Pieces.full, from the shards on the ranks of `data`; None: zeros."""

        def piece(name: str) -> Tensor:
            shard = self._all[name]
            flat = torch.zeros(shard.parameter.numel(), device=shard.parameter.device)
            own = of(shard)
            if own is not None:
                flat[shard.start : shard.end] = own.detach().flatten()
            if isinstance(self._optimizer, DistributedOptimizer):
                dist.all_reduce(flat, group=self._data)
            return flat.view_as(shard.parameter)

        return piece

    def copied(self) -> Callable[[], None]:
        """Copies weights and state; returns the function that restores them, as often as it is called."""
        copies = [
            (
                shard.parameter.detach().clone(),
                None if shard.main is None else shard.main.detach().clone(),
                {name: tensor.clone() for name, tensor in self.state(shard).items()},
            )
            for shard in self
        ]

        @torch.no_grad()
        def restore() -> None:
            for shard, (parameter, main, state) in zip(self, copies, strict=True):
                shard.parameter.copy_(parameter)
                if shard.main is not None and main is not None:
                    shard.main.copy_(main)
                    self.set_state(shard, {name: tensor.clone() for name, tensor in state.items()})

        return restore

    def _shard(self, name: str, parameter: Tensor) -> Shard:
        optimizer = self._optimizer
        if not isinstance(optimizer, DistributedOptimizer):
            return Shard(name, parameter, getattr(parameter, "main_param", parameter), 0, parameter.numel())
        if parameter not in optimizer.model_param_group_index_map:
            return Shard(name, parameter, None, 0, 0)
        group, place = optimizer.model_param_group_index_map[parameter]
        span = optimizer._get_model_param_range_map(parameter)["param"]
        return Shard(name, parameter, optimizer.optimizer.param_groups[group]["params"][place], span.start, span.end)
