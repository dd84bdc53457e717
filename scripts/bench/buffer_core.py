"""The CPU of the buffer's core, without sockets, of several states of the code in turns: what a change costs.

    python scripts/bench/buffer_core.py before=/tmp/before now=.

Each NAME=TREE is a checkout (from 30f3013 on). Of each, several processes run (`--processes`), and all of them issue,
put and hand out 64 trajectories at a time, in an order that is drawn anew: so a busy machine slows them all alike.
Prints us of CPU per trajectory of the deciding thread, each process's 10th percentile over the blocks, and their mean
over that of the first name. On a busy machine processes of one tree differ by 5% and more.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BLOCK = 64
"""Trajectories: the groups of one batch."""
WORK = ("issue", "put", "out")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", metavar="NAME=TREE")
    parser.add_argument("--tokens", type=int, default=512, help="per trajectory")
    parser.add_argument("--together", type=int, default=16, help="puts per commit; the buffer under load has 16")
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--processes", type=int, default=4, help="of each tree")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.tokens, args.together, args.blocks * BLOCK)
        return
    found = measured(args)
    first = next(iter(found.values()))
    for what in WORK:
        for name, processes in found.items():
            figures = [tenth(process[what]) for process in processes]
            ratio = statistics.mean(figures) / statistics.mean(tenth(process[what]) for process in first)
            each = " ".join(f"{figure:.1f}" for figure in figures)
            print(f"{what:5} {name:12} {statistics.mean(figures):6.1f} us, {ratio:.3f} of the first (each: {each})")


def tenth(figures: list[float]) -> float:
    return sorted(figures)[len(figures) // 10]


def measured(args: argparse.Namespace) -> dict[str, list[dict[str, list[float]]]]:
    options = [f"--{name}={getattr(args, name)}" for name in ("tokens", "together", "blocks")]
    workers: dict[tuple[str, int], subprocess.Popen[str]] = {}
    for name, _, tree in (text.partition("=") for text in args.trees):
        env = {**os.environ, "PYTHONPATH": str(Path(tree).resolve()), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "-", "--worker", *options]
        for n in range(args.processes):
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            workers[name, n] = subprocess.Popen(command, text=True, env=env, **pipes)
    found: dict[str, list[dict[str, list[float]]]] = {
        name: [{what: [] for what in WORK} for _ in range(args.processes)] for name, _ in workers
    }
    order = list(workers)
    for _ in range(args.blocks):
        for what in WORK:
            random.shuffle(order)
            for name, n in order:
                found[name][n][what].append(asked(workers[name, n], what))
    for worker in workers.values():
        worker.communicate(timeout=60)
    return found


def asked(worker: subprocess.Popen[str], what: str) -> float:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(f"{what}\n")
    worker.stdin.flush()
    return float(json.loads(worker.stdout.readline()))


def work(tokens: int, together: int, capacity: int) -> None:
    """Does what the lines of the standard input name, and answers each with its us of CPU per trajectory."""
    import buffer as bench  # of this folder; everything else is the tree's
    from asyncrl.buffer.core import Buffer
    from asyncrl.buffer.ledger.storage.database import Database
    from asyncrl.buffer.record import from_record, to_record
    from asyncrl.buffer.rules import Rules
    from asyncrl.buffer.tasks.sources import open_source

    config = bench.config("interval", capacity, tokens)
    with tempfile.TemporaryDirectory(prefix="asyncrl-core-") as folder:
        database = Database(Path(folder), "interval", 1e9)
        core = Buffer(database, Rules.of(config), open_source(config), 0.0)
        incarnation = core.start(0, 0, None).incarnation
        core.published(incarnation, 0, 0, "bench")
        core.commit(0.0)
        issued: list[Any] = []
        records: list[bytes] = []
        batch = 0

        def issue() -> None:
            for _ in range(BLOCK // 8):
                issued.extend(core.issue(0.0, "bench", (0, 0), 8)[0])
                core.commit(0.0)

        def put() -> None:
            for start in range(0, BLOCK, together):
                for record in records[start : start + together]:
                    assert core.accept(from_record(record), record) == "stored"
                core.commit(0.0)

        def out() -> None:
            answer = core.batch(0.0, incarnation, batch)
            assert answer.state == "ready", answer
            core.commit(0.0)
            core.finished(incarnation, batch, "applied")
            core.commit(0.0)

        todo: dict[str, Callable[[], None]] = {"issue": issue, "put": put, "out": out}
        gc.disable()
        for line in sys.stdin:
            begun = time.thread_time()
            todo[line.strip()]()
            print(json.dumps((time.thread_time() - begun) / BLOCK * 1e6), flush=True)
            if line.strip() == "issue":
                records = [to_record(bench.trajectory(ticket, tokens)) for ticket in issued]
                issued.clear()
            batch += line.strip() == "out"
        database.close()


if __name__ == "__main__":
    main()
