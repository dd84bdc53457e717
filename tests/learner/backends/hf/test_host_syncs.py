"""How often a pass makes the host wait for the GPU. Meta tensors stand for the GPU's: nothing computes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncrl.learner.backends.hf.row_attention import by_rows, in_one_call
from asyncrl.learner.backends.hf.scorer import Scorer
from tests.learner.backends.hf.test_torch import pack_rows, rows
from tests.learner.tiny import tiny_model

READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2")
COPIES = ("aten::_to_copy", "aten::copy_")
COPIES_OF_A_PART = 1
"""To the GPU: all indices of a pass in one."""


class HostSyncs(TorchDispatchMode):
    """Counts what reads values of tensors on `meta`, and what copies between it and the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()
        self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.name()
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        devices = {x.device.type for x in given if x.dim() or x.is_meta}
        to = str(kwargs.get("device") or "")
        if "meta" in devices and name in READS:
            self.reads[name] += 1
            return self._stand_in(name, given[0])
        if name in COPIES and "meta" in devices and to == "cpu":
            self.reads["to the CPU"] += 1
            return torch.zeros(given[0].shape, dtype=kwargs.get("dtype") or given[0].dtype)
        self.sent += name in COPIES and "cpu" in devices and (to == "meta" or "meta" in devices)
        return func(*args, **kwargs)

    @staticmethod
    def _stand_in(name: str, x: Tensor) -> Any:
        if name.endswith("nonzero"):
            return torch.zeros(5, x.dim(), dtype=torch.long, device="meta")
        return 1


def counted(layers: int, kernel: Any, checkpointing: Any) -> HostSyncs:
    scorer = Scorer(tiny_model(layers=layers), temperature=0.9, activation_checkpointing=checkpointing).to("meta")
    scorer.attention = kernel
    with HostSyncs() as syncs:
        scores = scorer(pack_rows(rows()))
        (scores.logprobs.sum() + scores.entropy.sum()).backward()  # type: ignore[no-untyped-call]
    return syncs


@pytest.mark.parametrize("kernel", [in_one_call, by_rows])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_pass_reads_nothing_back_and_sends_its_indices_once(kernel: Any, checkpointing: str) -> None:
    for layers in (1, 4):
        found = counted(layers, kernel, checkpointing)
        assert found.reads == {}, "in a layer or in a part"
        assert found.sent == COPIES_OF_A_PART, "whatever the number of layers"


def test_the_counter_counts() -> None:
    x = torch.ones(3, device="meta")
    with HostSyncs() as syncs:
        x.sum().item()
        x.nonzero()
        x.to("cpu")
        torch.ones(3).to("meta")
        torch.ones(3).sum().item()
    assert syncs.reads == {"aten::_local_scalar_dense": 1, "aten::nonzero": 1, "to the CPU": 1}
    assert syncs.sent == 1
