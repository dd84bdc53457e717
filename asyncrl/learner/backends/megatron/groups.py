"""The groups of ranks that compute together under Megatron-core.

8 ranks, tensor_parallel 2, pipeline_parallel 2:

             one micro-batch      another
   stage 0        0 1               2 3        the embedding and the first layers
   stage 1        4 5               6 7        the other layers and the head
             └ share each matrix  └
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.plugins import check_options


@dataclass(frozen=True, slots=True)
class Options:
    """learner.backend_options under `learner.backend: megatron`."""

    tensor_parallel: int = 1
    """Ranks that share each matrix; divides the model's key and value heads."""
    pipeline_parallel: int = 1
    """Ranks, or groups of tensor_parallel ranks, that share the layers; times tensor_parallel it divides
    learner.ranks."""
    sequence_parallel: bool = False
    """Activations between the matrices are split along the tokens over the ranks that share each matrix, to save
    memory."""
    distributed_optimizer: bool = False
    """Optimizer state sharded over the ranks that compute different micro-batches."""


def options_of(config: Config) -> Options:
    """Raises ConfigError for unknown options, and for those that do not fit learner.ranks."""
    given = config.learner.backend_options
    try:
        check_options(Options, given, "learner.backend_options")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if config.learner.cpu_offload:
        raise ConfigError("learner.cpu_offload is true, which learner.backend megatron does not support: use fsdp2.")
    return Options(**given)


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of one rank."""

    rank: int
    size: int
    """Number of all ranks"""
    tensor: dist.ProcessGroup
    """The ranks that share each matrix with it"""
    stages: dist.ProcessGroup
    """The ranks that compute the layers of its micro-batches, in their order"""
    data: dist.ProcessGroup
    """The ranks that hold the same piece and compute other micro-batches"""
    writers: dist.ProcessGroup
    """All ranks, over gloo: checkpoints are written while training continues"""

    @property
    def first(self) -> bool:
        """Whether its stage has the embedding."""
        return self.stages.rank() == 0

    @property
    def last(self) -> bool:
        """Whether its stage has the head."""
        return self.stages.rank() == self.stages.size() - 1

    @property
    def tells(self) -> bool:
        """Whether it has the scores of its micro-batches, and is the first of the ranks that do."""
        return self.last and self.tensor.rank() == 0


def join(options: Options, wait: timedelta, checkpoint: timedelta) -> Groups:
    """The groups of this process, which are created once; collective over all ranks. `checkpoint`: longest time to
    write one. Raises ConfigError."""
    ranks, tensor, stages = dist.get_world_size(), options.tensor_parallel, options.pipeline_parallel
    if tensor < 1 or ranks % tensor:
        raise ConfigError(
            f"learner.backend_options.tensor_parallel is {tensor}, which does not divide learner.ranks = {ranks}: "
            "choose a divisor."
        )
    if stages < 1 or ranks % (tensor * stages):
        raise ConfigError(
            f"learner.backend_options.pipeline_parallel is {stages}, and times tensor_parallel = {tensor} it does not "
            f"divide learner.ranks = {ranks}: choose a divisor of {ranks // tensor}."
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor, stages, distributed_timeout_minutes=wait.total_seconds() / 60)
    groups = Groups(
        dist.get_rank(),
        ranks,
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_data_parallel_group(),
        dist.new_group(backend="gloo", timeout=checkpoint),
    )
    if (groups.tensor.size(), groups.stages.size()) != (tensor, stages):
        raise ValueError("this process already splits its model differently")
    return groups
