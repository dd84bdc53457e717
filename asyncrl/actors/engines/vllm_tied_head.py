"""On a CPU a head that is tied to the embedding keeps, over vLLM's reload, the matrix packed from the old one.

It has no weights of its own to be loaded, so the reload passes it by (layerwise.py of vLLM 0.32) and logits come
silently from the new model's layers and the old model's head.
"""

from __future__ import annotations

from typing import Any


def pack_tied_head(model: Any, config: Any) -> None:
    """After a reload. `config`: vLLM's ModelConfig."""
    embedding = model.model.embed_tokens.weight if hasattr(model, "model") else None
    tied = getattr(config.hf_text_config, "tie_word_embeddings", False)
    if embedding is None or embedding.device.type != "cpu" or not tied:
        return
    head = model.lm_head
    head.weight = embedding
    if hasattr(head, "_already_called_process_weights_after_loading"):
        del head._already_called_process_weights_after_loading
    head.quant_method.process_weights_after_loading(head)
