"""Published and exported names equal the checkpoint's, for every family that asyncrl claims."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from asyncrl.checkpoint_names import places, put
from asyncrl.learner.backends.export import export
from asyncrl.learner.backends.hf.fsdp2 import Fsdp2Backend
from asyncrl.learner.backends.hf.torch import TorchBackend
from tests.learner.tiny import SIZE, tiny_config

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZE, head_dim=8, tie_word_embeddings=True)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZE, head_dim=8, **EXPERTS)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZE)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZE, head_dim=8)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SIZE, head_dim=8)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZE, head_dim=8)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZE, head_dim=8)),
}


def saved(folder: Path) -> dict[str, Tensor]:
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def made(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return FAMILIES[family]().float()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("loaded", [False, True], ids=["built", "loaded"])
def test_published_and_exported_names_are_the_checkpoint_s(family: str, loaded: bool, tmp_path: Path) -> None:
    model: Any = made(family)
    model.save_pretrained(tmp_path / "model")
    expected = saved(tmp_path / "model")
    if loaded:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    backend: Any = TorchBackend.__new__(TorchBackend)
    backend._model, backend._dtype = model, torch.float32
    assert same(dict(backend.weights()), expected)
    tied = set(expected) | {"lm_head.weight"}
    export(model, ((n, p.detach()) for n, p in model.named_parameters()), tmp_path / "export")
    assert same(saved(tmp_path / "export"), expected)
    assert set(places(model)) <= tied | {n for n, _ in model.named_buffers()}


@pytest.fixture
def alone() -> Iterator[None]:
    """A backend without ranks begins a process group of its own, which is none of the next test's."""
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_experts_are_published_from_shards() -> None:
    model = made("qwen3_moe")
    backend = Fsdp2Backend(tiny_config(backend="fsdp2"), model, device="cpu")
    names = [name for name, _ in backend.weights()]
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in names
    assert not any("gate_up_proj" in name for name in names)


def test_what_is_published_is_put_where_it_came_from(tmp_path: Path) -> None:
    model, other = made("qwen3_moe"), made("qwen3_moe")
    model.save_pretrained(tmp_path)
    state = other.state_dict(keep_vars=True)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
        where = places(other)
        for name, tensor in saved(tmp_path).items():
            assert tuple(tensor.shape) == where[name].shape
            put(state, where[name], tensor)
    mine = model.state_dict()
    assert all(torch.equal(tensor, mine[name]) for name, tensor in other.state_dict().items())
