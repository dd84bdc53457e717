"""A fake, within one process, of memory that another process maps (weights/device/cuda_ipc.py)."""

from __future__ import annotations

import uuid
from typing import Any

import torch
from torch import Tensor

_CHUNKS: dict[str, Tensor] = {}


def fake_export(chunk: Tensor) -> dict[str, Any]:
    name = uuid.uuid4().hex
    _CHUNKS[name] = chunk
    return {"gpu": "fake", "bytes": len(chunk), "handle": [name]}


def fake_mapped(said: dict[str, Any], device: torch.device) -> Tensor:
    return _CHUNKS[said["handle"][0]]
