"""Make the quickstart's model: Qwen3 with about 0.5M parameters, warmed up on flawed demonstrations.

It starts knowing the form of an episode and making too many wrong choices, so that reinforcement learning has
something to do and something to find.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from asyncrl.data.base import Task
from asyncrl.data.lookup import LookupSource
from asyncrl.quickstart.demonstrations import demonstrate
from asyncrl.quickstart.tokenizer import build_tokenizer

FLAW = 0.25
STEPS = 300
BATCH = 48
_LEARNING_RATE = 3e-3
_TASK_SEED = 1_000_003  # the warm-up's own stream of training tasks


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Qwen3ForCausalLM:
    """The untrained model for this tokenizer."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def warm_up(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, seed: int = 0, steps: int = STEPS, flaw: float = FLAW
) -> list[float]:
    """Supervised training on `steps` x `BATCH` demonstrations, loss on the assistant's tokens only; the loss per step."""
    source = LookupSource(seed=_TASK_SEED + seed)
    rng = random.Random(f"demonstrations/{seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, total_steps=steps, pct_start=0.1)
    losses = []
    model.train()
    for step in range(steps):
        tasks = [source.task(step * BATCH + index) for index in range(BATCH)]
        rows = asyncio.run(_demonstrations(tasks, rng, flaw, tokenizer))
        longest = max(len(ids) for ids, *_ in rows)
        ids = torch.tensor([ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids, *_ in rows])
        labels = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels, _ in rows])
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    model.eval()
    return losses


async def _demonstrations(
    tasks: list[Task], rng: random.Random, flaw: float, tokenizer: PreTrainedTokenizerFast
) -> list[tuple[list[int], list[int], bool]]:
    return [await demonstrate(task, rng, flaw, tokenizer) for task in tasks]
