"""Memory of one GPU that another process maps: the handle that it needs, without pickle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asyncrl.errors import ConfigError, RunError

_AFTER_DEVICE = 7
"""Index, among the arguments with which torch maps memory, at which numbers and handles begin."""


def require_cuda(channel: str) -> torch.device:
    """The GPU of this process. Raises ConfigError when it has none."""
    if not torch.cuda.is_available():
        raise ConfigError(
            f"weights.channel is {channel}, and this process sees no CUDA device: use weights.channel shm (one host) "
            "or zmq (several), or run it where there is a GPU (CUDA_VISIBLE_DEVICES, launch.gpus)."
        )
    return torch.device("cuda", torch.cuda.current_device())


def export(chunk: Tensor) -> dict[str, Any]:
    """The handle of a flat uint8 tensor on a GPU, in types of msgpack; valid while `chunk` exists.

    The publisher decides when it may be read, and has waited for all writes to it.
    """
    from torch.multiprocessing.reductions import reduce_tensor

    _, args = reduce_tensor(chunk)  # type: ignore[no-untyped-call]
    *handle, _wait_for_event = args[_AFTER_DEVICE:]
    return {"gpu": gpu(chunk.device), "bytes": len(chunk), "handle": [*handle, False]}


def mapped(handle: dict[str, Any], device: torch.device) -> Tensor:
    """The exported tensor, [bytes] uint8. Raises RunError if `device` is another GPU."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    if handle["gpu"] != gpu(device):
        raise RunError(
            f"weights.channel is cuda_ipc, and the learner's GPU is {handle['gpu']}, the engine's {gpu(device)}: give "
            "both the same one, or use weights.channel nccl."
        )
    size = torch.Size([handle["bytes"]])
    tensor: Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        Tensor, size, (1,), 0, torch.storage.TypedStorage, torch.uint8, device.index, *handle["handle"]
    )
    return tensor


def gpu(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
