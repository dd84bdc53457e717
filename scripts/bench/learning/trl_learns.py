"""TRL's GRPOTrainer on a single-turn task of examples/tasks; run by launched.py, with TRL's own Python.

python scripts/bench/learning/trl_learns.py SETTINGS_JSON OUT_JSON
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoTokenizer


def main() -> None:
    wanted, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(wanted["threads"])
    source = _named(wanted["source"])(seed=wanted["data_seed"])
    make_environment = _named(wanted["environment"])
    tasks = [source.task(index) for index in range(wanted["steps"] * wanted["groups"])]
    curve: list[dict[str, float]] = []

    async def played(task: dict[str, Any], text: str) -> float:
        environment = make_environment()
        await environment.reset(task)
        turn = await environment.step({"role": "assistant", "content": text})
        if not turn.done:
            raise ValueError(f"{wanted['environment']} takes several turns, which this script does not play")
        return float(turn.reward)

    def reward(completions: list[Any], completion_ids: list[list[int]], task: list[str], **_: Any) -> list[float]:
        rewards = [asyncio.run(played(json.loads(t), c[-1]["content"])) for t, c in zip(task, completions, strict=True)]
        tokens = curve[-1]["tokens"] if curve else 0
        curve.append(
            {
                "success": sum(r >= 1 for r in rewards) / len(rewards),
                "tokens": tokens + sum(len(ids) for ids in completion_ids),
                "s": time.perf_counter(),
            }
        )
        return rewards

    prompts = [[{"role": "user", "content": task["prompt"]}] for task in tasks]
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            model=wanted["model"],
            processing_class=AutoTokenizer.from_pretrained(wanted["model"]),
            reward_funcs=reward,
            train_dataset=Dataset.from_dict({"prompt": prompts, "task": [json.dumps(task) for task in tasks]}),
            args=trl.GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                per_device_train_batch_size=wanted["groups"] * wanted["group_size"],
                num_generations=wanted["group_size"],
                max_completion_length=wanted["new_tokens"],
                max_steps=wanted["steps"],
                learning_rate=wanted["lr"],
                lr_scheduler_type="constant_with_warmup",
                warmup_steps=wanted["warmup_steps"],
                adam_beta1=wanted["betas"][0],
                adam_beta2=wanted["betas"][1],
                max_grad_norm=wanted["max_grad_norm"],
                seed=wanted["seed"],
                beta=0.0,
                report_to=[],
                save_strategy="no",
                logging_steps=1000,
                disable_tqdm=True,
            ),
        )
        trainer.train()
    out.write_text(json.dumps({"trl": trl.__version__, "curve": curve}))


def _named(path: str) -> Any:
    """The object of `file.py:Name`."""
    file, _, name = path.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


if __name__ == "__main__":
    main()
