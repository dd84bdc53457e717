"""Loads new weights into vLLM's model on a CPU, in place: a third of the time of vLLM's own reload for a small model.

vLLM's reload moves every layer to the meta device, creates it again, loads and processes it, which suits any model and
any quantisation. For a dense Llama, Qwen2 or Qwen3 in full precision on one CPU less is enough: fused projections are
joined and packed for the matrix product again, everything else is copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
HEAD = "lm_head"


def suits(worker: Any) -> bool:
    """Whether `load` supports the worker's model."""
    config, model = worker.vllm_config, worker.model_runner.get_model()
    return (
        worker.model_runner.device.type == "cpu"
        and type(model).__name__ in ARCHITECTURES
        and config.parallel_config.world_size == 1
        and config.lora_config is None
        and all(
            type(module.quant_method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
            for module in model.modules()
            if getattr(module, "quant_method", None) is not None
        )
    )


@torch.no_grad()
def load(model: Any, given: Mapping[str, torch.Tensor], config: Any) -> None:
    """Load `given`, tensors by their Hugging Face names. `pack_tied_head` handles a head tied to the embedding.

    Raises KeyError for a missing tensor, before anything is changed.
    """
    packed: Mapping[str, list[str]] = model.packed_modules_mapping
    tied = getattr(config, "tie_word_embeddings", False)
    new = {
        name: [given[source] for source in _sources(name, packed)]
        for name, _ in model.named_parameters()
        if not (tied and name.startswith(HEAD))
    }
    for name, tensors in new.items():
        path, _, kind = name.rpartition(".")
        module = model.get_submodule(path)
        if kind == "weight" and isinstance(getattr(module, "quant_method", None), UnquantizedLinearMethod):
            # Packing removed the parameter; the tensors given here stay mapped for this call only.
            module.weight = torch.nn.Parameter(torch.cat(tensors), requires_grad=False)
            module.quant_method.process_weights_after_loading(module)
            continue
        own = getattr(module, kind).data
        new_value = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        own[: len(new_value)].copy_(new_value)  # the vocabulary may be padded
        if isinstance(getattr(module, "quant_method", None), UnquantizedEmbeddingMethod):
            module.quant_method.process_weights_after_loading(module)


def _sources(name: str, packed: Mapping[str, list[str]]) -> list[str]:
    """Hugging Face names of the parts of `name`, in order."""
    path, _, kind = name.rpartition(".")
    parent, _, own = path.rpartition(".")
    return [f"{parent}.{part}.{kind}" for part in packed[own]] if own in packed else [name]


def pack_tied_head(model: Any, config: Any) -> None:
    """After a reload on a CPU, pack a head that is tied to the embedding again. `config`: vLLM's ModelConfig.

    Such a head has no weights of its own, so vLLM's reload (0.32, layerwise.py) skips it and it keeps the matrix packed
    from the old embedding. Without this call, logits would silently come from the new layers and the old head.
    """
    embedding = model.model.embed_tokens.weight if hasattr(model, "model") else None
    tied = getattr(config.hf_text_config, "tie_word_embeddings", False)
    if embedding is None or embedding.device.type != "cpu" or not tied:
        return
    head = model.lm_head
    head.weight = embedding
    if hasattr(head, "_already_called_process_weights_after_loading"):
        del head._already_called_process_weights_after_loading
    head.quant_method.process_weights_after_loading(head)
