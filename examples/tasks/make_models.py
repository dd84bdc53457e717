"""Make the start models of the tasks in this folder, and measure how well they begin: some minutes of one core.

    python examples/tasks/make_models.py                      # all, into examples/tasks/models/
    python examples/tasks/make_models.py wordle chain --seed 1 --out /tmp/models
    python examples/tasks/make_models.py reversal --teacher   # into examples/tasks/models/reversal-teacher

Each is the quickstart's architecture with a tokenizer of its own, warmed up on demonstrations with a bad habit
(`flawed` in the task's file). A teacher is the start model, trained further on those of the `oracle`. Success on 200
held-out tasks is printed, greedily and at temperature 1.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

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
_TEACHER_RATE = 1e-3
"""AdamW's learning rate for a teacher"""


def main() -> None:
    options = _options()
    torch.set_num_threads(1)  # the sums are then the same ones each time
    for name in options.tasks or NAMES:
        began, cpu = time.monotonic(), time.process_time()
        folder = options.out / name
        if options.teacher:
            start, folder = folder, options.out / f"{name}-teacher"
            losses = make_teacher(name, folder, start, seed=options.seed, steps=options.steps)
        else:
            losses = make(name, folder, seed=options.seed, steps=options.steps)
        spent = f"{time.monotonic() - began:.0f} s, {time.process_time() - cpu:.0f} s of them on a core"
        print(f"{folder}: made in {spent}; loss {sum(losses[-20:]) / len(losses[-20:]):.3f}", flush=True)
        if options.held_out:
            sampled, greedy = measured(name, folder, options.held_out)
            print(f"  greedy           {greedy}\n  at temperature 1 {sampled}", flush=True)


def make(name: str, folder: Path, *, seed: int = 0, steps: int | None = None) -> list[float]:
    """Make the start model of a task in `folder`; returns the loss of each step. The same seed gives the same model."""
    positions, flawed = config_of(name).env.max_tokens, part(name, "flawed")
    tokenizer = build_tokenizer(part(name, "PIECES"), positions)
    model = build_model(tokenizer, seed, positions)
    rng = random.Random(f"demonstrations/{name}/{seed}")
    return _trained(name, folder, model, tokenizer, lambda messages: flawed(messages, rng), rng, steps)


def make_teacher(name: str, folder: Path, start: Path, *, seed: int = 0, steps: int | None = None) -> list[float]:
    """Make the teacher of a task in `folder` from its start model in `start`, as `make` does."""
    if not (start / "config.json").is_file():
        raise SystemExit(f"{start} holds no start model, from which a teacher begins: run this without --teacher first")
    model = Qwen3ForCausalLM.from_pretrained(start)
    tokenizer = AutoTokenizer.from_pretrained(start)
    rng = random.Random(f"teacher/{name}/{seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=_TEACHER_RATE, weight_decay=0.0)
    return _trained(name, folder, model, tokenizer, part(name, "oracle"), rng, steps, [optimizer])


def _trained(
    name: str,
    folder: Path,
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    act: Callable[[Sequence[Any]], str],
    rng: random.Random,
    steps: int | None,
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> list[float]:
    config = config_of(name)
    source, make_environment = open_source(config), environment(config)

    async def demonstrated(number: int) -> Row:
        return await play_demonstration(make_environment(), source.task(_FIRST + number), act, tokenizer)

    losses = warm_up_on(
        model, tokenizer, demonstrated, rng, part(name, "STEPS") if steps is None else steps, optimizers
    )
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
    parser.add_argument("--teacher", action="store_true", help="the task's teacher instead of its start model")
    parser.add_argument("--steps", type=int, help="warm-up steps; default: the task's")
    parser.add_argument("--held-out", type=int, default=200, help="held-out tasks that the model plays; 0: none")
    options = parser.parse_args()
    if unknown := [name for name in options.tasks if name not in NAMES]:
        parser.error(f"there is no task {unknown[0]!r}: expected some of {', '.join(NAMES)}")
    return options


if __name__ == "__main__":
    main()
