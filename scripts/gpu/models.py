"""Random models and tokenizers of a given shape, made without a download.

One token is one character, or the text `<n>`; no text leads to the latter. The embeddings carry a planted direction:
along the first coordinate the rows of even tokens lie on one side and those of odd ones on the other, so that the
reward of `task.py` can be learned in a few steps, as it could not be from weights without any structure.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

Shape = dict[str, Any]
QWEN3_06B: Shape = {
    "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072,
}  # fmt: skip
TINY: Shape = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024,
}  # fmt: skip
PAD, EOS = 95, 96
FIRST = 97
"""The first token `<n>`; those before are characters, padding and the end."""
PLANTED = 0.2


def config(shape: Shape) -> Qwen3Config:
    return Qwen3Config(
        **shape, tie_word_embeddings=True, bos_token_id=None, eos_token_id=EOS, pad_token_id=PAD,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )  # fmt: skip


def random_model(shape: Shape, seed: int = 0, device: str = "cpu") -> Qwen3ForCausalLM:
    """In float32."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = Qwen3ForCausalLM(config(shape))
    with torch.no_grad():
        ids = torch.arange(shape["vocab_size"], device=device)
        model.get_input_embeddings().weight[:, 0] = torch.where(ids % 2 == 0, PLANTED, -PLANTED)
    return model


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    ids = {chr(c): c - 32 for c in range(32, 127)} | {"<pad>": PAD, "<eos>": EOS}
    ids |= {f"<{n}>": n for n in range(FIRST, vocabulary)}
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab=ids, merges=[], unk_token="<pad>")),
        pad_token="<pad>", eos_token="<eos>",
    )  # fmt: skip
    made.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    )
    return made


def write(folder: Path, shape: Shape, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A folder that transformers and vLLM load. The model is made on the CPU: all of a GPU is for the runs."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer(shape["vocab_size"]).save_pretrained(folder)
    random_model(shape, seed).to(dtype).save_pretrained(folder)
    return folder
