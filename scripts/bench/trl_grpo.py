"""What a user would pick instead on a laptop: TRL's GRPOTrainer, timed end to end. Run by overlap.py; prints JSON.

Needs the `bench` extra. One process generates and trains in turns on all cores, which is how TRL runs without a
separate inference server.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time

import torch
import trl
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback


class StepClock(TrainerCallback):
    """Wall clock at the end of every training step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args, **kwargs) -> None:
        self.ends.append(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True, help="JSON file: a list of prompt texts")
    parser.add_argument("--groups", type=int, default=8, help="prompts per step")
    parser.add_argument("--group-size", type=int, default=8, help="completions per prompt")
    parser.add_argument("--new-tokens", type=int, default=32, help="most tokens per completion")
    parser.add_argument("--steps", type=int, default=20, help="training steps, with those of the warm-up")
    parser.add_argument("--warm-up", type=int, default=5, help="first steps that are not measured")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    with open(args.prompts) as file:
        prompts = json.load(file)
    generated: list[int] = []

    def reward(completion_ids, **_) -> list[float]:
        """Even token ids: any cheap signal will do, the clock is what counts."""
        generated.append(sum(len(ids) for ids in completion_ids))
        return [sum(i % 2 == 0 for i in ids) / max(len(ids), 1) for ids in completion_ids]

    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            model=args.model,
            processing_class=tokenizer,
            reward_funcs=reward,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            callbacks=[clock],
            args=trl.GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                per_device_train_batch_size=args.groups * args.group_size,
                num_generations=args.group_size,
                max_completion_length=args.new_tokens,
                max_steps=args.steps,
                learning_rate=args.lr,
                beta=0.0,
                report_to=[],
                save_strategy="no",
                logging_steps=1000,
                disable_tqdm=True,
            ),
        )
        trainer.train()
    seconds = clock.ends[-1] - clock.ends[args.warm_up - 1]
    tokens = sum(generated[args.warm_up :])  # one call of `reward` per step
    print(json.dumps({"trl": trl.__version__, "tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds}))


if __name__ == "__main__":
    main()
