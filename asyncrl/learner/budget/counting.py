"""Counts what torch makes and computes, operation by operation, of real tensors and of fake ones alike."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

BACKWARD_ATTENTION = 2.5
"""Arithmetic of attention's backward pass over that of its forward pass: five matrix products instead of two."""

EXPERTS = torch.ops.aten._grouped_mm.default
"""The matrix product of a mixture of experts: each row of the one with the matrix of its expert."""


VARLEN = "_varlen_attn"
VARLEN_BACKWARD = "_varlen_attn_backward"


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of tensors that were made within and are alive, and floating-point operations of matrix products and
    attention; elementwise operations are not counted."""

    def __init__(self, present: Iterable[Tensor] = ()) -> None:
        """`present`: tensors that exist already; what is written into them, and views of them, is not counted."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.live, self.peak = 0, 0
        self.flops = 0.0
        self._known = {tensor.untyped_storage()._cdata for tensor in present}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = _made(func, args, kwargs or {})
        self.flops += _flops(func, args, kwargs or {}, made)
        self.peak = max(self.peak, self.live + workspace(func, args))
        for tensor in tree_iter(made):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        if key in self._known:
            self._known.discard(key)
            self.live -= size


def _made(func: Any, args: Any, kwargs: Any) -> Any:
    """The result; of fake tensors, torch knows the shape of EXPERTS in bfloat16 only, though its kernels compute
    others too."""
    if func is not EXPERTS or not isinstance(args[0], FakeTensor):
        return func(*args, **kwargs)
    left, right, *rest = args
    return func(left.bfloat16(), right.bfloat16(), *rest, **kwargs).to(left.dtype)


def _flops(func: Any, args: Any, kwargs: Any, made: Any) -> float:
    packet = func._overloadpacket
    if packet.__name__ in (VARLEN, VARLEN_BACKWARD):
        return _varlen_flops(packet.__name__ == VARLEN_BACKWARD, args)
    if func is EXPERTS:  # each row meets one expert, whichever of the two has the rows
        left, right = args[:2]
        return float(2 * math.prod(left.shape[-2:]) * right.shape[-1])
    if "flash_attention" in packet.__name__ and "for_cpu" in packet.__name__:
        backward = packet.__name__.endswith("backward")
        query, key = args[1:3] if backward else args[:2]
        return (BACKWARD_ATTENTION if backward else 1.0) * causal_flops(query, key)
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=made))
    return 0.0


def workspace(func: Any, args: Any) -> int:
    """Bytes that a kernel takes while it runs and that are no tensor here: flash attention's backward pass sums the
    query's gradient in float32, and has the keys' and values' for each head of the query before it adds them up."""
    if func._overloadpacket.__name__ != VARLEN_BACKWARD:
        return 0
    _, query, key, value = args[:4]
    tokens, heads, d = query.shape
    shared = 0 if key.shape[1] == heads else (len(key) + len(value)) * heads * d * query.element_size()
    return int(tokens * heads * (d + 1) * 4 + shared)


def _varlen_flops(backward: bool, args: Any) -> float:
    query, own_ends, seen_ends = (args[1], args[6], args[7]) if backward else (args[0], args[3], args[4])
    own, seen = own_ends.diff().double(), seen_ends.diff().double()
    pairs = float((own * (seen - own) + own * (own + 1) / 2).sum())
    return float((BACKWARD_ATTENTION if backward else 1.0) * 4 * query.shape[1] * query.shape[2] * pairs)


def causal_flops(query: Tensor, key: Tensor) -> float:
    """Operations of the last len(query) of len(key) tokens, each of which attends to itself and those before it."""
    _, heads, own, d = query.shape
    prefix = key.shape[2] - own
    return 4.0 * heads * d * (own * prefix + own * (own + 1) / 2)
