"""Make the quickstart's model again: tokenizer, tiny Qwen3, warm-up on flawed demonstrations. A minute of one core.

It writes into asyncrl/quickstart/checkpoint; `--out` names another folder.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from asyncrl.model import QUICKSTART
from asyncrl.quickstart.build import STEPS, make_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the quickstart's model.")
    parser.add_argument("--out", type=Path, default=QUICKSTART, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the demonstrations")
    parser.add_argument("--steps", type=int, default=STEPS, help="warm-up steps")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the sums are then the same ones each time
    began = time.monotonic()
    make_checkpoint(options.out, seed=options.seed, steps=options.steps)
    print(f"{options.out}: made in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
