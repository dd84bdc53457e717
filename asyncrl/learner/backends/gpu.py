"""The GPU of a rank: which one it takes, and that no two ranks take the same."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import torch

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.process.gpus import require_given


def visible() -> int:
    """The number of GPUs that torch sees, without touching one."""
    return torch.cuda.device_count()


def take_gpu(config: Config, rank: int) -> None:
    """Selects the rank's GPU and bounds its memory. Call it before anything is put on a GPU: otherwise the first GPU
    holds a context of every rank, and the bound applies to rank 0 alone.

    Raises ConfigError when the launcher gave a GPU and there is none.
    """
    require_given(visible())
    if visible():
        torch.cuda.set_device(index_of(rank))
        torch.cuda.set_per_process_memory_fraction(config.learner.gpu_memory)


def index_of(rank: int) -> int:
    """The rank's index among the GPUs that its process sees: the launcher and Ray show each rank its own, which is
    0 there; ranks that were started by hand see all of them."""
    return rank % visible()


def identity() -> str:
    """This process's GPU, the same text in every process that uses it."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{socket.gethostname()} {properties.uuid}"


def refuse_same(gpus: Sequence[str]) -> None:
    """`gpus`: the identity of each rank's. Raises ConfigError when two ranks have the same, since NCCL's own error
    names no remedy."""
    for rank, gpu in enumerate(gpus):
        if (first := gpus.index(gpu)) != rank:
            raise ConfigError(
                f"learner.ranks is {len(gpus)}, and ranks {first} and {rank} have the same GPU ({gpu}): each rank "
                "needs its own. Lower learner.ranks, or show more GPUs (CUDA_VISIBLE_DEVICES, launch.gpus)."
            )
