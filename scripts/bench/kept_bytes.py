"""Bytes of kept ids per sampled token, under each way of truncating the distribution.

The embedded engine plays the first tasks of a configuration, with fixed seeds, and every episode is encoded as it is
stored. Two models: the configuration's, and one of random weights of its size, whose distribution is much wider.

    ids         mean of the tokens whose ids are recorded, and the largest number
    bytes       of the record per sampled token, without and with kept ids
    beyond      share of tokens for which more than `actors.max_kept` were left: no ids, and no loss

Nothing is timed, so that the figures are the same on any machine, up to the rounding of its float32. Run it from the
root of the repository: `PYTHONPATH=. python scripts/bench/kept_bytes.py`. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from asyncrl.actors.engines import build_engine
from asyncrl.actors.episodes.progress import Progress
from asyncrl.actors.player import player
from asyncrl.buffer.record import to_record
from asyncrl.config import Config
from asyncrl.model import resolve_path
from asyncrl.rendering.build import build_renderer
from asyncrl.trajectory import Ticket, TicketId, Trajectory
from asyncrl.trial.command import first_tasks

WAYS: dict[str, dict[str, Any]] = {
    "top_p 0.8": {"top_p": 0.8},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 20": {"top_k": 20},
    "min_p 0.1": {"min_p": 0.1},
    "top_p 0.95, top_k 20": {"top_p": 0.95, "top_k": 20},
}


async def played(config: Config, episodes: int) -> list[Trajectory]:
    engine, renderer, tasks = build_engine(config), build_renderer(config), first_tasks(config, episodes)
    await engine.start()
    try:
        async with player(config, engine, renderer, actor="actor-0") as play:

            async def one(i: int) -> Trajectory:
                ticket = Ticket(TicketId(0, i, 0), 0, "train", tasks[i], (0, 0), 1, 1.0, i, 30.0)
                return await play(ticket, Progress(time.monotonic()))

            return list(await asyncio.gather(*(one(i) for i in range(episodes))))
    finally:
        await engine.close()


def measured(trajectories: list[Trajectory]) -> dict[str, Any]:
    counts = np.concatenate([row.kept.counts for t in trajectories for row in t.rows if row.kept is not None])
    known = counts[counts > 0]
    bare = [replace(t, rows=tuple(replace(row, kept=None) for row in t.rows)) for t in trajectories]
    tokens = len(counts)
    return {
        "tokens": tokens,
        "ids_mean": round(float(known.mean()), 2) if len(known) else None,
        "ids_max": int(counts.max()),
        "beyond": round(float((counts == 0).mean()), 4),
        "bytes_without": round(sum(len(to_record(t)) for t in bare) / tokens, 1),
        "bytes_with": round(sum(len(to_record(t)) for t in trajectories) / tokens, 1),
    }


def random_model(path: Path, to: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).save_pretrained(to)
    AutoTokenizer.from_pretrained(path).save_pretrained(to)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--episodes", type=int, default=64)
    args = parser.parse_args()
    config = Config.load(args.config)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        random_model(resolve_path(config.model), Path(folder))
        for model, path in (("the configuration's", config.model.path), ("random", folder)):
            for way, truncation in WAYS.items():
                values = config.model_dump(mode="json")
                values["model"]["path"] = path
                values["actors"] |= truncation
                found[f"{model}, {way}"] = measured(asyncio.run(played(Config.model_validate(values), args.episodes)))
    print(json.dumps({"config": args.config, "episodes": args.episodes, "measured": found}, indent=2))


if __name__ == "__main__":
    main()
