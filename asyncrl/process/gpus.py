"""The GPUs that the launcher gave this process, and the refusal to compute on a CPU in their place."""

from __future__ import annotations

import os

from asyncrl.errors import ConfigError

GIVEN = "ASYNCRL_GPUS"
"""Environment variable: number of GPUs that the launcher has reserved for the process."""
SHARED = "ASYNCRL_GPU_SHARED"
"""Environment variable: 1 where another process of the run uses one of them too."""


def given() -> int:
    return int(os.environ.get(GIVEN, "0"))


def shared() -> bool:
    return os.environ.get(SHARED) == "1"


def require_given(seen: int) -> None:
    """Raises ConfigError when torch sees fewer GPUs than this process was given: it would compute on a CPU."""
    if seen < given():
        raise ConfigError(
            f"launch.gpus gives this process {given()} GPU{'s' if given() > 1 else ''}, and torch sees {seen} "
            f"(CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}): install a CUDA build of "
            "torch that fits the driver, or set launch.gpus to 0 for this role to compute on the CPU."
        )
