"""A fake: stands in for SGLang's kernels, whose wheel is for CUDA. SGLang's torch path on a CPU never calls one."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"sgl_kernel is a fake here: {name} was called")

    return absent
