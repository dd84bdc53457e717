"""The command of every table: runs what is not on the disk yet, one child process per run, and prints the table.

    python scripts/bench/learning/TABLE.py                  # seeds 0 to 4, on which the table is judged
    python scripts/bench/learning/TABLE.py --tune           # seeds 100 to 104, into TABLE-tuning.json
    python scripts/bench/learning/TABLE.py --report         # what there is so far, without running anything

Writes bench/results/learning/TABLE.json, a row as soon as its run is over. A child is forked from a process that has
imported torch once (Linux): an import takes as long as a short training.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from learning.declared import JUDGED_ON, ROOT, TUNED_ON, Arm, Table
from learning.report import markdown
from learning.rows import Row, Rows, key, machine

RESULTS = ROOT / "bench" / "results" / "learning"


@dataclass(frozen=True, slots=True)
class Run:
    """One row to be."""

    task: str
    arm: Arm
    seed: int


def main(table: Table) -> None:
    options = _options(table)
    seeds = options.seeds or list(TUNED_ON if options.tune else JUDGED_ON)
    rows = Rows(options.results / f"{table.name}{'-tuning' if options.tune else ''}.json")
    chosen = replace(table, arms=tuple(arm for arm in table.arms if not options.arms or arm.name in options.arms))
    if options.tune:
        table, chosen = (replace(each, arms=each.tried()) for each in (table, chosen))
    planned = [
        Run(task, arm, seed)
        for task in options.tasks or table.tasks
        for seed in seeds
        for arm in chosen.arms
        if not arm.only or task in arm.only
    ]
    if not options.report:
        for number, (run, row) in enumerate(islice(made(table, planned, rows), options.most), 1):
            print(f"[{number}] {run.task} {run.arm.name} seed {run.seed}: {_short(row)}", flush=True)
    print(markdown(table, [row for run in planned if (row := _current(table, run, rows))]))


def made(table: Table, planned: Sequence[Run], rows: Rows) -> Iterator[tuple[Run, Row]]:
    """Every run that has no row yet, or one of another config or start model, and its row once it is stored."""
    for run in planned:
        if _current(table, run, rows) is None:
            began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            place = {"task": run.task, "arm": run.arm.name, "seed": run.seed}
            row = place | {"key": _key(table, run), "began": began} | in_child(table, run) | {"machine": machine()}
            rows.add(row)
            yield run, row


def in_child(table: Table, run: Run) -> Row:
    """The result of the run. Raises RuntimeError if the child ends without one."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(theirs, table, run))
    child.start()
    theirs.close()
    try:
        result: Row = ours.recv()
    except EOFError:
        child.join()
        raise RuntimeError(f"{run} ended with code {child.exitcode}: see above for why.") from None
    child.join()
    return result


def _child(pipe: Any, table: Table, run: Run) -> None:
    pipe.send(run.arm.make(table.config(run.task, run.arm, run.seed), run.arm.lag))


def _current(table: Table, run: Run, rows: Rows) -> Row | None:
    """The run's row, unless it was made with other settings than those of today."""
    row = rows.get(run.task, run.arm.name, run.seed)
    return row if row is not None and row["key"] == _key(table, run) else None


def _key(table: Table, run: Run) -> str:
    return key(table.config(run.task, run.arm, run.seed), run.arm.lag)


def _short(row: Row) -> str:
    names = ("held_out", "steps", "tokens", "skipped", "wall_s", "cpu_s")
    return ", ".join(f"{name} {row[name]:g}" for name in names if row.get(name) is not None)


def _options(table: Table) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=table.question)
    parser.add_argument("--tune", action="store_true", help="seeds 100 to 104, on which settings are chosen")
    parser.add_argument("--seeds", type=int, nargs="+", help="these instead")
    parser.add_argument("--tasks", nargs="+", choices=list(table.tasks), help="only these")
    parser.add_argument("--arms", nargs="+", choices=[arm.name for arm in table.arms], help="only these")
    parser.add_argument("--most", type=int, help="make so many rows, then end; default: all that are missing")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    return parser.parse_args()
