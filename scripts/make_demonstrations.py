"""Write demonstrations of the quickstart's task as JSON lines: chats of an agent that looks up two keys, calculates and
answers. configs/sft.yaml trains on examples/demonstrations.jsonl, which this wrote."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path

from asyncrl.actors.envs.lookup import LookupEnv
from asyncrl.data.sources.lookup import LookupSource
from asyncrl.quickstart.demonstrations import acting, play_chat
from asyncrl.quickstart.tokenizer import build_tokenizer

OUT = Path(__file__).parents[1] / "examples" / "demonstrations.jsonl"
TASKS = 2_000_003  # a stream of tasks that neither the quickstart nor its warm-up uses


def chats(count: int, seed: int, flaw: float) -> Iterator[str]:
    """`count` demonstrations, each a line of JSON."""
    source, rng = LookupSource(seed=TASKS + seed), random.Random(f"demonstrations/{seed}")
    tokenizer = build_tokenizer()
    for index in range(count):
        task = source.task(index)
        chat, _ = asyncio.run(play_chat(LookupEnv(max_turns=8), task, acting(task, rng, flaw, 0.0), tokenizer))
        yield json.dumps({"messages": chat.messages, "tools": chat.tools})


def main() -> None:
    parser = argparse.ArgumentParser(description="Write demonstrations of the quickstart's task.")
    parser.add_argument("--out", type=Path, default=OUT, help="file to write")
    parser.add_argument("--count", type=int, default=256, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the tasks and the flaws")
    parser.add_argument("--flaw", type=float, default=0.0, help="probability of an error at each choice")
    options = parser.parse_args()
    options.out.write_text("".join(f"{line}\n" for line in chats(options.count, options.seed, options.flaw)))
    print(f"{options.out}: {options.count} demonstrations")


if __name__ == "__main__":
    main()
