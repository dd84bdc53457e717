"""TRL's SFTTrainer on rows that were rendered already, timed from step to step. Run by sft.py; prints JSON.

Needs the `bench` extra. Its defaults where nothing is named here: rows padded to the longest of the batch, all logits.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback


class StepClock(TrainerCallback):
    """Wall clock at the end of every training step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args, **kwargs) -> None:
        self.ends.append(time.perf_counter())


class Counting(trl.SFTTrainer):
    """Counts the tokens that carry loss, step by step."""

    def __init__(self, *args, **kwargs) -> None:
        self.trained: list[int] = []
        super().__init__(*args, **kwargs)

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.trained.append(int((inputs["labels"][:, 1:] != -100).sum()))
        return super().compute_loss(model, inputs, *args, **kwargs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", required=True, help="JSON file: a list of {input_ids, assistant_masks}")
    parser.add_argument("--per-step", type=int, required=True, help="rows per step")
    parser.add_argument("--steps", type=int, required=True, help="training steps, with those of the warm-up")
    parser.add_argument("--warm-up", type=int, required=True, help="first steps that are not measured")
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with open(args.rows) as file:
        rows = json.load(file)
    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Counting(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(args.model),
            train_dataset=Dataset.from_list(rows),
            callbacks=[clock],
            args=trl.SFTConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                per_device_train_batch_size=args.per_step,
                max_length=None,
                max_steps=args.steps,
                learning_rate=args.lr,
                adam_beta2=0.95,
                report_to=[],
                save_strategy="no",
                logging_steps=1000,
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
        )
        trainer.train()
    seconds = clock.ends[-1] - clock.ends[args.warm_up - 1]
    tokens = sum(trainer.trained[args.warm_up :])
    versions = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"versions": versions, "tokens": tokens, "seconds": seconds}))


if __name__ == "__main__":
    main()
