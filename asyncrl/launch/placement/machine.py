"""The GPUs of this machine, counted without using one."""

from __future__ import annotations

from pathlib import Path

DRIVERS = ("nvidia[0-9]*", "kfd", "dxg")
"""Names in /dev of NVIDIA's GPUs, of AMD's, and of either under WSL."""


def has_driver(devices: Path = Path("/dev")) -> bool:
    """Whether the system has the device files of a GPU's driver."""
    return any(next(devices.glob(pattern), None) is not None for pattern in DRIVERS)


def gpus_here() -> int:
    """The number of GPUs that torch sees. Torch, which takes seconds to import, is asked where there is a driver."""
    if not has_driver():
        return 0
    from asyncrl.learner.backends.gpu import visible

    return visible()
