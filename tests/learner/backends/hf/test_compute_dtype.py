"""`model.dtype` is what every backend computes in, over float32 weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.learner.backends.hf.fsdp2 import Fsdp2Backend
from asyncrl.learner.backends.hf.scorer import layers
from asyncrl.learner.backends.hf.torch import TorchBackend
from tests.learner.backends.hf.test_torch import one_update, pack_rows, rows
from tests.learner.kept_ranks import on_kept_ranks
from tests.learner.tiny import tiny_config, tiny_model


def in_bfloat16(**learner: Any) -> Config:
    config = tiny_config(**learner)
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})


def states_between_layers(backend: TorchBackend) -> set[torch.dtype]:
    """Of what enters a layer, leaves it, and meets attention in it."""
    found: set[torch.dtype] = set()

    def note(_: Any, given: Any, out: Any) -> None:
        found.update(x.dtype for x in (*given, out) if isinstance(x, Tensor))

    hooks = [m.register_forward_hook(note) for layer in layers(backend._model) for m in (layer, *layer.children())]
    backend.logprobs([pack_rows(rows())])
    for hook in hooks:
        hook.remove()
    return found


def test_residual_stream_and_norms_are_of_the_models_dtype() -> None:
    assert states_between_layers(TorchBackend(in_bfloat16(), tiny_model(), device="cpu")) == {torch.bfloat16}
    assert states_between_layers(TorchBackend(tiny_config(), tiny_model(), device="cpu")) == {torch.float32}


@pytest.mark.parametrize("learner", [{}, {"activation_checkpointing": True}, {"lora": {"r": 3}}])
def test_weights_and_gradients_stay_float32(learner: dict[str, Any]) -> None:
    backend = TorchBackend(in_bfloat16(**learner), tiny_model(), device="cpu")
    before = {n: p.detach().clone() for n, p in backend._model.named_parameters()}
    backend.accumulate([pack_rows(rows())], lambda _, scores: scores.logprobs.sum())
    trained = [(n, p) for n, p in backend._model.named_parameters() if p.requires_grad]
    assert {p.grad.dtype for _, p in trained if p.grad is not None} == {torch.float32}
    assert all(p.grad is not None for _, p in trained)
    assert {p.dtype for p in backend._model.parameters()} == {torch.float32}
    assert all(torch.equal(p.detach(), before[n]) for n, p in backend._model.named_parameters())
    one_update(backend, 0)
    assert any(not torch.equal(p.detach(), before[n]) for n, p in trained)


def test_a_pass_that_fails_leaves_the_weights() -> None:
    backend = TorchBackend(in_bfloat16(), tiny_model(), device="cpu")
    attention: Any = layers(backend._model)[1].self_attn

    def fails(*_: Any) -> None:
        raise OSError("in the middle of a layer")

    hook = attention.register_forward_hook(fails)
    with pytest.raises(OSError, match="in the middle"):
        backend.logprobs([pack_rows(rows())])
    hook.remove()
    assert {p.dtype for p in backend._model.parameters()} == {torch.float32}
    assert all(isinstance(p, torch.nn.Parameter) for p in backend._model.parameters())


def passed(sharded: bool, learner: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    backend: Any = (Fsdp2Backend if sharded else TorchBackend)(in_bfloat16(**learner), tiny_model(), device="cpu")
    parts = [pack_rows(rows())]
    scores = backend.logprobs(parts)
    backend.accumulate(parts, lambda _, s: s.logprobs.sum())
    gradients = {n: p.grad for n, p in backend._model.named_parameters() if p.requires_grad}
    whole = {n: g.full_tensor() if sharded else g for n, g in gradients.items()}
    return [x for s in scores for x in (s.logprobs, s.entropy)], whole


@pytest.mark.parametrize("learner", [{}, {"lora": {"r": 3}}], ids=["all", "lora"])
def test_one_process_and_fsdp2_compute_the_same(learner: dict[str, Any]) -> None:
    alone = passed(False, learner)
    sharded = on_kept_ranks(1, passed, True, learner)[0]
    for a, b in zip(alone[0], sharded[0], strict=True):
        assert torch.equal(a, b)
    for name, gradient in alone[1].items():
        scale = float(gradient.abs().max()) or 1.0  # of A nothing, while B is zero
        torch.testing.assert_close(sharded[1][name] / scale, gradient / scale, atol=1e-2, rtol=0.0)
