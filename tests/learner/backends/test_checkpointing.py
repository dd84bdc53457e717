"""What the backward pass computes again, by `learner.activation_checkpointing`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.config import Config
from asyncrl.learner.backends.checkpointing import KEPT
from asyncrl.learner.backends.hf.row_attention import in_one_call
from asyncrl.learner.backends.hf.scorer import Scorer
from asyncrl.learner.backends.protocol import Packed
from asyncrl.learner.budget.counting import Counter
from tests.learner.backends.hf.test_torch import pack_rows, rows
from tests.learner.tiny import tiny_config, tiny_model

WAYS = ("none", "selective", "full")


class OfAttention(TorchDispatchMode):
    """Counts calls of attention's forward kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func.name() in KEPT
        return func(*args, **(kwargs or {}))


def scorer_of(way: Any) -> Scorer:
    return Scorer(tiny_model(layers=3), temperature=1.0, activation_checkpointing=way)


def passed(way: Any, part: Packed) -> tuple[int, int, dict[str, Tensor]]:
    """Calls of attention, bytes that are alive between forward and backward, gradients."""
    scorer = scorer_of(way)
    with OfAttention() as attention, Counter(scorer.parameters()) as counted:
        total = scorer(part).logprobs.sum()
        held = counted.live
        total.backward()  # type: ignore[no-untyped-call]
    return attention.calls, held, {n: p.grad for n, p in scorer.named_parameters() if p.grad is not None}


def test_selective_computes_attention_once_and_holds_little_more_than_full() -> None:
    part = Packed(torch.arange(120) % 40, torch.arange(120) > 0, (120,))
    found = {way: passed(way, part) for way in WAYS}
    assert [found[way][0] for way in WAYS] == [3, 3, 6]
    none, selective, full = (found[way][1] for way in WAYS)
    assert full < selective < full + 0.3 * (none - full)
    for way in WAYS[1:]:
        for name, gradient in found["none"][2].items():
            assert torch.equal(found[way][2][name], gradient), (way, name)


def test_so_it_is_of_the_call_that_a_gpu_computes() -> None:
    found = []
    for way in WAYS:
        scorer = scorer_of(way).to("meta")
        scorer.attention = in_one_call
        with OfAttention() as attention:
            scorer(pack_rows(rows())).logprobs.sum().backward()
        found.append(attention.calls)
    assert found == [3, 3, 6]


@pytest.mark.parametrize(("given", "way"), [(True, "full"), (False, "none"), ("selective", "selective")])
def test_the_former_spellings_are_read(given: Any, way: str) -> None:
    assert tiny_config(activation_checkpointing=given).learner.activation_checkpointing == way


def test_another_word_is_refused_and_so_are_compiled_layers_of_selective() -> None:
    with pytest.raises(ValueError, match="'none', 'selective' or 'full'"):
        tiny_config(activation_checkpointing="some")
    with pytest.raises(ValueError, match=r"learner\.compile is true and learner\.activation_checkpointing selective"):
        Config.model_validate({"learner": {"compile": True, "activation_checkpointing": "selective"}})
