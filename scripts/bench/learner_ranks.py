"""What the loss costs a rank of the learner, at the same rows a rank, on 1, 2 and 4 ranks over gloo.

    loss        CPU seconds of a rank in the loss of micro-batches, on one thread, without the model's passes
    exchange    CPU seconds of a rank in telling the others: before, the scores of each round of micro-batches; now,
                what the losses found, once an update

--before FOLDER runs the asyncrl of another source tree in turn with this one, number of ranks by number of ranks. CPU
seconds are compared, not the clock's, since four ranks share two cores here; of a step, those of the rank that took
longest, and the median of the measured steps. The model is tiny, so that a step is short; the loss does not depend on
it.

Prints a table, and writes bench/results/learner_ranks.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from results import finish, keep

ROOT = Path(__file__).parents[2]
RANKS = (1, 2, 4)
PART = 16384
DEADLINE_S = 900
VOCABULARY = 64
GROUP = 8
Found = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another source tree, measured in turn with this one")
    parser.add_argument("--steps", type=int, default=5, help="measured, after one that is not")
    parser.add_argument("--tokens", type=int, default=512, help="of a row")
    parser.add_argument("--parts", type=int, default=2, help="micro-batches of 16k tokens that a rank computes")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "learner_ranks.json")
    parser.add_argument("--rank", type=int, nargs=2, metavar=("RANK", "RANKS"), help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        print(json.dumps(of_a_rank(*given.rank, given)))
        return
    trees = {"now": ROOT} if given.before is None else {"before": given.before.resolve(), "now": ROOT}
    machine = {"platform": platform.platform(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    found: Found = {"machine": machine, "steps": given.steps, "tokens": given.tokens, "cells": []}
    for ranks in RANKS:
        for name, tree in trees.items():
            found["cells"].append({"code": name, "ranks": ranks} | cell(tree, ranks, given))
            keep(given.out, found)
    machine["load_after"] = os.getloadavg()[0]
    print(table(found["cells"]))
    finish(given.out, found)


def cell(tree: Path, ranks: int, given: argparse.Namespace) -> Found:
    """The slowest rank's seconds of a step, and how often a rank called the loss."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, __file__, "--meet", f"{folder}/meet", "--steps", str(given.steps)]
        words += ["--tokens", str(given.tokens), "--parts", str(given.parts), "--rank"]
        interface = "lo0" if sys.platform == "darwin" else "lo"
        environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface}
        started = [
            subprocess.Popen([*words, str(r), str(ranks)], stdout=subprocess.PIPE, text=True, env=environment)
            for r in range(ranks)
        ]
        try:
            told = [process.communicate(timeout=DEADLINE_S)[0] for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
    each = [json.loads(text.splitlines()[-1]) for text in told]

    def slowest(what: str) -> float:
        return statistics.median(max(of_ranks) for of_ranks in zip(*(one[what] for one in each), strict=True))

    return {
        "calls": max(max(one["calls"]) for one in each),
        "parts": each[0]["parts"],
        "loss_s": slowest("loss_s"),
        "exchange_s": slowest("exchange_s"),
        "step_cpu_s": slowest("step_cpu_s"),
    }


def of_a_rank(rank: int, ranks: int, given: argparse.Namespace) -> Found:
    """Played in a process of its own, with the asyncrl of its source tree."""
    import torch
    import torch.distributed as dist
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from asyncrl.config import Config
    from asyncrl.learner.backends import distribution
    from asyncrl.learner.backends.hf.fsdp2 import Fsdp2Backend
    from asyncrl.learner.batch import flatten
    from asyncrl.learner.objective.objective import Objective
    from asyncrl.learner.step import record, update
    from asyncrl.learner.step.train_step import train_step

    torch.set_num_threads(1)
    wait = timedelta(seconds=DEADLINE_S)
    dist.init_process_group("gloo", store=dist.FileStore(given.meet, ranks), rank=rank, world_size=ranks, timeout=wait)
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, num_key_value_heads=1, head_dim=16, **size))
    groups = ranks * given.parts * PART // given.tokens // GROUP
    learner = {"groups_per_step": groups, "group_size": GROUP, "tokens_per_micro_batch": PART, "backend": "fsdp2"}
    config = Config.model_validate({"learner": learner | {"ranks": ranks}, "buffer": {"capacity": 10 * groups * GROUP}})
    backend, objective = Fsdp2Backend(config, model, device="cpu"), Objective(config.learner)
    batch = flatten(episodes(groups, given.tokens), range(groups))
    calls, loss_s, exchange_s = Clock(), Clock(), Clock()
    loss_s.of(update.Update, "_loss", time.thread_time, calls)
    exchange_s.of(distribution.Rounds, "gathered", time.process_time)
    if hasattr(record.Record, "include"):
        exchange_s.of(record.Record, "include", time.process_time)
    found: Found = {"calls": [], "loss_s": [], "exchange_s": [], "step_cpu_s": []}
    for n in range(1 + given.steps):
        begun = time.process_time()
        train_step(backend, objective, batch, config.learner, version=n)
        numbers = (calls.taken(), loss_s.taken(), exchange_s.taken(), time.process_time() - begun)
        if n:
            for values, number in zip(found.values(), numbers, strict=True):
                values.append(number)
    return found | {"parts": -(-sum(batch.lengths.tolist()) // PART)}


class Clock:
    """Adds up what the calls of a method took."""

    def __init__(self) -> None:
        self._total = 0.0

    def of(self, kind: type, method: str, clock: Any, calls: Clock | None = None) -> None:
        timed = getattr(kind, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            begun = clock()
            result = timed(*args, **kwargs)
            self._total += clock() - begun
            if calls is not None:
                calls._total += 1
            return result

        setattr(kind, method, call)

    def taken(self) -> float:
        """Since it was asked last."""
        total, self._total = self._total, 0.0
        return total


def episodes(groups: int, tokens: int) -> list[Any]:
    """One row each, an eighth of it prompt; rewards of a group differ."""
    from asyncrl.trajectory import CONTEXT, Row, TicketId, Trajectory

    rng = np.random.default_rng(0)
    mask = np.arange(tokens) >= tokens // 8
    made = []
    for group in range(groups):
        for index in range(GROUP):
            ids = rng.integers(0, VOCABULARY, tokens).astype(np.int32)
            logprobs = np.where(mask, rng.normal(-4.2, 0.1, tokens), 0).astype(np.float32)
            row = Row(ids, mask, logprobs, np.where(mask, 0, CONTEXT).astype(np.int32))
            reward = float(index % 2)
            made.append(
                Trajectory(
                    id=TicketId(0, group, index),
                    attempt=0,
                    kind="train",
                    actor="actor-0",
                    task_id=f"t{group}",
                    env="made up",
                    rows=(row,),
                    reward=reward,
                    rewards={},
                    turns=1,
                    stop_reason="done",
                )
            )
    return made


def table(cells: list[Found]) -> str:
    lines = [
        f"{'ranks':>5} {'code':<7} {'micro-batches':>13} {'losses a rank':>13} {'loss s':>8} {'over 1 rank':>11} "
        f"{'exchange s':>10} {'CPU of the step':>15}"
    ]
    one = {x["code"]: x["loss_s"] for x in cells if x["ranks"] == 1}
    for x in cells:
        lines.append(
            f"{x['ranks']:>5} {x['code']:<7} {x['parts']:>13} {x['calls']:>13.0f} {x['loss_s']:>8.4f} "
            f"{x['loss_s'] / one[x['code']]:>11.2f} {x['exchange_s']:>10.4f} {x['step_cpu_s']:>15.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
