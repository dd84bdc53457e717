"""Make the quickstart's model again: tokenizer, tiny Qwen3, warm-up on flawed demonstrations. About a minute of one core.

    python scripts/make_quickstart_model.py                       # into asyncrl/quickstart/checkpoint
    python scripts/make_quickstart_model.py --out /tmp/model --seed 1
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from asyncrl.quickstart import CHECKPOINT
from asyncrl.quickstart.model import STEPS, make_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the quickstart's model.")
    parser.add_argument("--out", type=Path, default=CHECKPOINT, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the demonstrations")
    parser.add_argument("--steps", type=int, default=STEPS, help="warm-up steps")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the sums are then the same ones each time
    began = time.monotonic()
    make_checkpoint(options.out, seed=options.seed, steps=options.steps)
    print(f"{options.out}: made in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
