"""A checksum that is computed where the tensor is, at the speed of its memory: for weights that never leave a GPU.

Fletcher's two sums over 32-bit words, modulo 2^64: of the words, and of the words times their place. Equal bytes have
equal sums on every device. They find what is torn, stale, shifted or swapped; they do not stop a forger.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 1 << 22
"""Words that are widened to 64 bits at once."""


def sums(data: Tensor) -> Tensor:
    """[2] int64, on the device of `data`, a flat uint8 tensor that begins at a multiple of 4 bytes."""
    found = torch.zeros(2, dtype=torch.int64, device=data.device)
    whole = len(data) - len(data) % 4
    words = data[:whole].view(torch.int32)
    for start in range(0, len(words), BLOCK):
        part = words[start : start + BLOCK].to(torch.int64)
        found[0] += part.sum()
        found[1] += (part * torch.arange(start + 1, start + 1 + len(part), device=data.device)).sum()
    if rest := len(data) - whole:
        last = torch.zeros(4, dtype=torch.uint8, device=data.device)
        last[:rest] = data[whole:]
        found += last.view(torch.int32).to(torch.int64) * torch.tensor([1, len(words) + 1], device=data.device)
    return found


def named(found: Sequence[Tensor]) -> list[str]:
    """32 hex digits for each of `found`; one transfer from the device for all."""
    return [struct.pack("<qq", *pair).hex() for pair in torch.stack(list(found)).tolist()] if found else []
