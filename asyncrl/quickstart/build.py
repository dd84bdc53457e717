"""Make the quickstart's model: Qwen3 with about 0.5M parameters, warmed up on flawed demonstrations.

It starts knowing the form of an episode, making too many wrong choices, and adding whatever sign the question shows
more often than not, so that reinforcement learning has errors to remove and a skill to find.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from asyncrl.data.sources.lookup import LookupSource
from asyncrl.quickstart.demonstrations import demonstrate
from asyncrl.quickstart.tokenizer import build_tokenizer
from asyncrl.quickstart.warm_up import Row, warm_up_on

FLAW = 0.12
HABIT = 0.6
STEPS = 700
_TASK_SEED = 1_000_003  # a stream of training tasks that only the warm-up uses


def make_checkpoint(folder: Path, *, seed: int = 0, steps: int = STEPS) -> None:
    """Build, warm up and save model and tokenizer in `folder`. On one machine, the same seed gives the same model."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed)
    warm_up(model, tokenizer, seed=seed, steps=steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0, positions: int = 256) -> Qwen3ForCausalLM:
    """The untrained model for this tokenizer, which reads `positions` tokens."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        initializer_range=0.08,  # the usual 0.02 suits widths of thousands; at 128 it costs hundreds of steps
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def warm_up(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, seed: int = 0, steps: int = STEPS
) -> list[float]:
    """Train on `steps` x `BATCH` demonstrations of the quickstart's tasks; returns the loss of each step."""
    source = LookupSource(seed=_TASK_SEED + seed)
    rng = random.Random(f"demonstrations/{seed}")

    async def demonstrated(number: int) -> Row:
        return await demonstrate(source.task(number), rng, FLAW, HABIT, tokenizer)

    return warm_up_on(model, tokenizer, demonstrated, rng, steps)
