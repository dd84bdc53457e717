"""A tiny classifier with random weights, in a process of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncrl.rewards import run_score
from asyncrl.rewards.scores.reward_model import RewardModel, classify


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    from asyncrl.quickstart.tokenizer import build_tokenizer

    path = tmp_path_factory.mktemp("reward_model")
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    Qwen3ForSequenceClassification(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.slow  # two processes that import torch
def test_a_batch_is_scored_in_another_process_as_one_by_one_here(folder: Path) -> None:
    questions = ["What is fox + owl?", "What is ant * bee? What is it?"]
    alone = [
        classify(
            [[{"role": "user", "content": question}, {"role": "assistant", "content": "7"}]],
            path=str(folder), device="cpu", dtype="float32", label=0, max_tokens=64,
        )[0]
        for question in questions
    ]  # fmt: skip
    assert alone[0] != alone[1]

    async def together() -> list[float]:
        score = RewardModel(str(folder), batch_size=2, wait_s=5.0, timeout_s=100.0, max_tokens=64)
        tasks = [{"id": str(i), "prompt": question} for i, question in enumerate(questions)]
        return [found.value for found in await asyncio.gather(*(run_score(score, task, "7") for task in tasks))]

    assert asyncio.run(together()) == pytest.approx(alone, abs=1e-5)
    with pytest.raises(ValueError, match=r"reward_model\.label is 3; .* has 1 outputs"):
        classify([[]], path=str(folder), device="cpu", dtype="float32", label=3, max_tokens=8)
