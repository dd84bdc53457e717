"""A tiny decoder of a real family, and batches of random episodes for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from asyncrl.config import Config
from asyncrl.trajectory import CONTEXT, Row, Span, TicketId, Trajectory, TurnReward

VOCABULARY = 40
SIZE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}


def tiny_model(family: str = "qwen3", seed: int = 0, layers: int = 2) -> PreTrainedModel:
    torch.manual_seed(seed)
    size = SIZE | {"num_hidden_layers": layers}
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**size, head_dim=8, tie_word_embeddings=True))
    if family == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**size, tie_word_embeddings=False))
    return LlamaForCausalLM(LlamaConfig(**size, tie_word_embeddings=False))


def tiny_config(ranks_per_node: int = 0, **learner: Any) -> Config:
    """`ranks_per_node`: with ranks on several nodes of Ray; 0: on this machine."""
    given = {"groups_per_step": 4, "group_size": 4, "lr": 1e-3, "tokens_per_micro_batch": 128}
    nodes = {
        "launch": {"backend": "ray", "host": "127.0.0.1", "ranks_per_node": ranks_per_node},
        "weights": {"channel": "zmq"},
    }
    sections = {"learner": given | learner, "buffer": {"capacity": 4096}}
    return Config.model_validate(sections | (nodes if ranks_per_node else {}))


def random_trajectory(
    group: int, index: int, rng: np.random.Generator, *, rows: int = 1, versions: tuple[int, int] = (0, 0)
) -> Trajectory:
    """An episode of a made-up policy: logprobs near those of a uniform one, a hole in every row."""
    made = []
    for _ in range(rows):
        length = int(rng.integers(8, 40))
        mask = rng.random(length) < 0.6
        mask[0], mask[-2] = False, True
        logprobs = np.where(mask, rng.normal(-3.7, 0.3, length).clip(max=0), 0)
        row_versions = np.where(mask, rng.integers(versions[0], versions[1] + 1, length), CONTEXT)
        made.append(
            Row(
                rng.integers(0, VOCABULARY, length).astype(np.int32),
                mask,
                logprobs.astype(np.float32),
                row_versions.astype(np.int32),
            )
        )
    reward = float(rng.integers(0, 2))
    return Trajectory(
        id=TicketId(0, group, index),
        attempt=0,
        kind="train",
        actor="actor-0",
        task_id=f"t{group}",
        env="fake",
        rows=tuple(made),
        reward=reward,
        rewards={"success": reward},
        turns=2,
        stop_reason="done",
    )


def with_turns(t: Trajectory, *rewards: float, states: Sequence[bytes | None] = ()) -> Trajectory:
    """The episode with as many turns, which have earned these rewards in these states: the runs of sampled tokens are
    theirs, in order, those of the last turn to the end."""
    spans: list[list[Span]] = [[] for _ in rewards]
    turn = 0
    for place, row in enumerate(t.rows):
        edges = np.flatnonzero(np.diff(np.concatenate(([False], row.mask, [False])).astype(int))).tolist()
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            spans[turn].append(Span(place, start, end - start))
            turn = min(turn + 1, len(rewards) - 1)
    names = states or [None] * len(rewards)
    turns = tuple(TurnReward(r, tuple(s), k) for r, s, k in zip(rewards, spans, names, strict=True))
    return replace(t, turns=len(rewards), reward=float(sum(rewards)), turn_rewards=turns)
