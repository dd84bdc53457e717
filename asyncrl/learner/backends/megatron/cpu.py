"""Megatron-core on a machine without a GPU, for tests and small trials.

Megatron-core writes `torch.cuda.current_device()` and `device="cuda"` where it means "where the model is", and keeps
generators of the GPU's random numbers for dropout, which asyncrl never has. On CPUs the first two must mean the CPU,
the generators do nothing, and pipeline stages have no GPU to wait for. None of
Megatron's own functions is replaced. With a GPU this refuses to run: there Megatron-core runs as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def stand_in() -> None:
    """Makes the CPU this process's current GPU; may be called several times."""
    if torch.cuda.is_available():
        raise RuntimeError(
            "stand_in() replaces a missing GPU, and this machine has one: "
            'set CUDA_VISIBLE_DEVICES="" to test on the CPU'
        )
    torch.cuda.current_device = _cpu  # type: ignore[assignment]
    torch.cuda.synchronize = _do_not_wait
    random._CUDA_RNG_STATE_TRACKER = _NoGenerators()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True


class OnCpu(TorchFunctionMode):
    """Places tensors requested on "cuda" on the CPU, and gives CPU tensors the type name of a GPU's, which the
    optimizer and its clipping assert."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        if function is torch.Tensor.cuda:
            return args[0]
        result = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


def _cpu() -> torch.device:
    return CPU


def _do_not_wait(device: Any = None) -> None:
    pass


class _NoGenerators(random.CudaRNGStatesTracker):  # type: ignore[misc]
    """Nothing is drawn: weights come from a checkpoint and there is no dropout."""

    @contextlib.contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        yield
