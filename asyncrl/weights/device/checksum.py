"""A checksum computed on the tensor's device, at memory speed: for weights that never leave a GPU.

Fletcher's two sums over 32-bit words, modulo 2^64: of the words, and of the words times their place. Equal bytes have
equal sums on every device. They detect torn, stale, shifted or swapped data; they do not stop a forger.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 1 << 22
"""Words that are widened to 64 bits at once."""


def checksum(data: Tensor) -> Tensor:
    """[2] int64, on the device of `data`, a flat uint8 tensor that begins at a multiple of 4 bytes."""
    sums = torch.zeros(2, dtype=torch.int64, device=data.device)
    aligned = len(data) - len(data) % 4
    words = data[:aligned].view(torch.int32)
    for start in range(0, len(words), BLOCK):
        part = words[start : start + BLOCK].to(torch.int64)
        sums[0] += part.sum()
        sums[1] += (part * torch.arange(start + 1, start + 1 + len(part), device=data.device)).sum()
    if rest := len(data) - aligned:
        last = torch.zeros(4, dtype=torch.uint8, device=data.device)
        last[:rest] = data[aligned:]
        sums += last.view(torch.int32).to(torch.int64) * torch.tensor([1, len(words) + 1], device=data.device)
    return sums


def as_hex(checksums: Sequence[Tensor]) -> list[str]:
    """32 hex digits for each checksum, with one transfer from the device."""
    return [struct.pack("<qq", *pair).hex() for pair in torch.stack(list(checksums)).tolist()] if checksums else []
