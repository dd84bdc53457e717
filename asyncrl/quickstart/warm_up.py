"""The supervised warm-up of a tiny model on demonstrated episodes: minutes of one core."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

BATCH = 16
_LEARNING_RATE = 5e-3
_POOL = 20  # batches whose rows are sorted by length together

Row = tuple[list[int], list[int], bool]
"""Token ids, labels, and whether the episode succeeded."""

Demonstrated = Callable[[int], Awaitable[Row]]
"""Demonstrates the episode of one number, counted from 0."""


def warm_up_on(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    demonstrated: Demonstrated,
    rng: random.Random,
    steps: int,
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> list[float]:
    """Train on `steps` x `BATCH` demonstrations, loss on the assistant's tokens only; returns the loss of each step.

    Each demonstration is asked for once, in the order of its number; `rng` orders the batches. Without `optimizers`,
    those are taken with which a model learns soonest from nothing.
    """
    optimizers = optimizers or _optimizers(model)
    schedules = [LambdaLR(optimizer, lambda step: _rate(step / steps)) for optimizer in optimizers]
    losses = []
    model.train()
    for batch in _batches(demonstrated, rng, steps):
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


def _batches(demonstrated: Demonstrated, rng: random.Random, steps: int) -> Iterator[list[Row]]:
    """Yields `steps` batches of rows of similar length: a third of a batch drawn at random would be padding."""
    for first in range(0, steps, _POOL):
        numbers = range(first * BATCH, min(first + _POOL, steps) * BATCH)
        rows = sorted(asyncio.run(_all(demonstrated, numbers)), key=lambda row: len(row[0]))
        batches = [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]
        rng.shuffle(batches)
        yield from reversed(batches)


async def _all(demonstrated: Demonstrated, numbers: range) -> list[Row]:
    return [await demonstrated(number) for number in numbers]


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
