"""Make the quickstart's model: Qwen3 with about 0.5M parameters, warmed up on flawed demonstrations.

It starts knowing the form of an episode, making too many wrong choices, and adding whatever sign the question shows
more often than not, so that reinforcement learning has errors to remove and a skill to find.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from asyncrl.data.base import Task
from asyncrl.data.sources.lookup import LookupSource
from asyncrl.quickstart.demonstrations import demonstrate
from asyncrl.quickstart.tokenizer import build_tokenizer

FLAW = 0.12
HABIT = 0.6
STEPS = 700
BATCH = 16
_LEARNING_RATE = 5e-3
_POOL = 20  # batches whose rows are sorted by length together
_TASK_SEED = 1_000_003  # a stream of training tasks that only the warm-up uses

Row = tuple[list[int], list[int], bool]
"""Token ids, labels, and whether the episode succeeded."""


def make_checkpoint(folder: Path, *, seed: int = 0, steps: int = STEPS) -> None:
    """Build, warm up and save model and tokenizer in `folder`. On one machine, the same seed gives the same model."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed)
    warm_up(model, tokenizer, seed=seed, steps=steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Qwen3ForCausalLM:
    """The untrained model for this tokenizer."""
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
        max_position_embeddings=256,
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
    """Train on `steps` x `BATCH` demonstrations, loss on the assistant's tokens only; returns the loss of each step."""
    source = LookupSource(seed=_TASK_SEED + seed)
    rng = random.Random(f"demonstrations/{seed}")
    optimizers = _optimizers(model)
    schedules = [LambdaLR(optimizer, lambda step: _rate(step / steps)) for optimizer in optimizers]
    losses = []
    model.train()
    for batch in _batches(source, tokenizer, rng, steps):
        longest = max(len(ids) for ids, *_ in batch)
        ids = torch.tensor([ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids, *_ in batch])
        labels = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels, _ in batch])
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    model.eval()
    return losses


def _batches(
    source: LookupSource, tokenizer: PreTrainedTokenizerFast, rng: random.Random, steps: int
) -> Iterator[list[Row]]:
    """Yields `steps` batches of rows of similar length: a third of a batch drawn at random would be padding."""
    for first in range(0, steps, _POOL):
        tasks = [source.task(index) for index in range(first * BATCH, min(first + _POOL, steps) * BATCH)]
        rows = sorted(asyncio.run(_demonstrations(tasks, rng, tokenizer)), key=lambda row: len(row[0]))
        batches = [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]
        rng.shuffle(batches)
        yield from reversed(batches)


def _optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, with which the model learns to copy in half the steps of AdamW; AdamW for the others."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=_LEARNING_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def _rate(done: float) -> float:
    """Share of the learning rate at this share of the steps: linear warm-up, constant, linear decay."""
    return min(1.0, 0.05 + done / 0.1, (1.0 - done) / 0.3)


async def _demonstrations(tasks: list[Task], rng: random.Random, tokenizer: PreTrainedTokenizerFast) -> list[Row]:
    return [await demonstrate(task, rng, FLAW, HABIT, tokenizer) for task in tasks]
