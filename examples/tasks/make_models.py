"""Make the start models of the tasks in this folder, and measure how well they begin: some minutes of one core.

    python examples/tasks/make_models.py                      # all, into examples/tasks/models/
    python examples/tasks/make_models.py wordle chain --seed 1 --out /tmp/models

Each is the quickstart's architecture with a tokenizer of its own, warmed up on demonstrations with a bad habit
(`flawed` in the task's file). Its success on 200 held-out tasks is printed, greedily and at temperature 1.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from asyncrl.actors.player import environment
from asyncrl.buffer.tasks.sources import open_source
from asyncrl.config import Config
from asyncrl.config.held_out import held_out_sets
from asyncrl.evaluation import ALL, by_source, play_held_out, with_model
from asyncrl.plugins import resolve
from asyncrl.quickstart.build import build_model
from asyncrl.quickstart.demonstrations import play_demonstration
from asyncrl.quickstart.tokenizer import build_tokenizer
from asyncrl.quickstart.warm_up import Row, warm_up_on
from asyncrl.success import Success

HERE = Path(__file__).parent
NAMES = ("reversal", "wordle", "countdown", "frozen_lake", "chain")
_FIRST = 1_000_000_000
"""Index of the first training task that is demonstrated: one that no run reaches."""


def main() -> None:
    options = _options()
    torch.set_num_threads(1)  # the sums are then the same ones each time
    for name in options.tasks or NAMES:
        began, cpu, folder = time.monotonic(), time.process_time(), options.out / name
        losses = make(name, folder, seed=options.seed, steps=options.steps)
        spent = f"{time.monotonic() - began:.0f} s, {time.process_time() - cpu:.0f} s of them on a core"
        print(f"{folder}: made in {spent}; loss {sum(losses[-20:]) / len(losses[-20:]):.3f}", flush=True)
        if options.held_out:
            sampled, greedy = measured(name, folder, options.held_out)
            print(f"  greedy           {greedy}\n  at temperature 1 {sampled}", flush=True)


def make(name: str, folder: Path, *, seed: int = 0, steps: int | None = None) -> list[float]:
    """Make the start model of a task in `folder`; returns the loss of each step. The same seed gives the same model."""
    config = config_of(name)
    positions = config.env.max_tokens
    tokenizer = build_tokenizer(part(name, "PIECES"), positions)
    model = build_model(tokenizer, seed, positions)
    source, make_environment, flawed = open_source(config), environment(config), part(name, "flawed")
    rng = random.Random(f"demonstrations/{name}/{seed}")

    async def demonstrated(number: int) -> Row:
        task = source.task(_FIRST + number)
        return await play_demonstration(make_environment(), task, lambda messages: flawed(messages, rng), tokenizer)

    losses = warm_up_on(model, tokenizer, demonstrated, rng, part(name, "STEPS") if steps is None else steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return losses


def measured(name: str, folder: Path, tasks: int) -> tuple[Success, Success]:
    """Success of the model in `folder` on the first held-out tasks: at temperature 1, and greedily."""
    config = with_model(config_of(name, {"eval.tasks": tasks}), folder)
    (held_out,) = held_out_sets(config)
    sampled, greedy = asyncio.run(play_held_out(config, folder, Console(stderr=True)))
    return by_source(sampled, held_out)[ALL], by_source(greedy, held_out)[ALL]


def config_of(name: str, values: dict[str, Any] | None = None) -> Config:
    return Config.load(HERE / f"{name}.yaml", values or {})


def part(name: str, what: str) -> Any:
    """What the task's file defines under this name."""
    return resolve(f"{HERE / name}.py:{what}", None, "task")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make the start models of the tasks.")
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"{', '.join(NAMES)}; default: all")
    parser.add_argument("--out", type=Path, default=HERE / "models", help="folder of the models' folders")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the demonstrations")
    parser.add_argument("--steps", type=int, help="warm-up steps; default: the task's")
    parser.add_argument("--held-out", type=int, default=200, help="held-out tasks that the model plays; 0: none")
    options = parser.parse_args()
    if unknown := [name for name in options.tasks if name not in NAMES]:
        parser.error(f"there is no task {unknown[0]!r}: expected some of {', '.join(NAMES)}")
    return options


if __name__ == "__main__":
    main()
