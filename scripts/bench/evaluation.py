"""What evaluation during the run costs the training rate, where generation is the bottleneck and cores are free.

The quickstart's task, whose tools sleep, so that actors wait more than they compute. In one go, in turn:

    none        2 actors train
    reserved    the same 2 actors train, a third one is reserved (`actors.eval: 1`), evaluation every 10 steps
    chosen      2 actors, one of them chosen for each evaluation (`eval.share`), every 10 steps

The rate is training steps per second from step 5 to the last, from the records of each run; the evaluations before the
first and after the last step are not in it. Prints ratios to `none` of the same repeat and writes
bench/results/evaluation.json.
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
from pathlib import Path
from typing import Any

from results import finish, keep

from asyncrl.audit.reading import read_ledger
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.sinks.jsonl import by_step

ROOT = Path(__file__).parents[2]
SETTLE = 5
"""Training steps at the start of a run that are not measured."""
ARMS: dict[str, dict[str, Any]] = {
    "none": {"actors": {"count": 2}, "eval": {"every": 0}},
    "reserved": {"actors": {"count": 3, "eval": 1}, "eval": {"every": 10}},
    "chosen": {"actors": {"count": 2}, "eval": {"every": 10}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=45, help="training steps per run")
    parser.add_argument("--latency", default="1.0", help="env.options.tool_latency_s")
    parser.add_argument("--tasks", type=int, default=20, help="held-out tasks of an evaluation")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one run")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "evaluation.json")
    args = parser.parse_args()
    results: list[dict[str, dict[str, float]]] = []

    def found() -> dict[str, Any]:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()}
        settings = {name: str(value) for name, value in vars(args).items() if name != "out"}
        return {"machine": machine, "settings": settings, "results": results}

    for repeat in range(args.repeats):
        results.append({})
        for arm in ARMS:
            results[-1][arm] = measured(arm, args, seed=repeat)
            row = results[-1][arm]
            ratio = row["steps_per_s"] / results[-1]["none"]["steps_per_s"]
            print(f"{repeat} {arm:<9} {row['steps_per_s']:.4f} steps/s  {ratio:.3f} of none  "
                  f"{row['evaluations']:.0f} sets played, {row['skipped']:.0f} skipped", flush=True)  # fmt: skip
            keep(args.out, found())
    for arm in [arm for arm in ARMS if arm != "none"]:
        costs = [1 - row[arm]["steps_per_s"] / row["none"]["steps_per_s"] for row in results]
        span = f"from {min(costs):.1%} to {max(costs):.1%}"
        print(f"{arm}: costs {statistics.median(costs):.1%} of the training rate ({span})")
    finish(args.out, found())


def measured(arm: str, args: argparse.Namespace, seed: int) -> dict[str, float]:
    """One run."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as work:
        config = {
            "env": {"name": "lookup", "max_turns": 6, "max_tokens": 256, "options": {"tool_latency_s": args.latency}},
            "actors": {"slots": 16, "max_new_tokens": 48} | ARMS[arm]["actors"],
            "buffer": {"max_staleness": 2, "capacity": 256},
            "learner": {"steps": args.steps, "groups_per_step": 4, "group_size": 4, "lr": 1e-4},
            "eval": {"tasks": args.tasks} | ARMS[arm]["eval"],
            "launch": {"seed": seed, "name": "run", "runs_dir": work},
        }
        path = Path(work) / "config.json"
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "asyncrl", "launch", "--config", str(path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=args.timeout, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        run = RunFolder(Path(work) / "run")
        at = {int(record["step"]): record["wall_s"] for record in steps(run)}
        evals = read_ledger(run.buffer).tables["evals"]
        between = [row for row in evals if 0 < row["due"] < args.steps]
        return {
            "steps_per_s": (args.steps - 1 - SETTLE) / (at[args.steps - 1] - at[SETTLE]),
            "evaluations": float(sum(row["state"] == "done" for row in between)),
            "skipped": float(sum(row["state"] == "skipped" for row in between)),
        }


def steps(run: RunFolder) -> list[dict[str, float]]:
    """Records of the training steps; that of the last step is merged with the evaluation behind it."""
    return [record for record in by_step(run.metrics) if "reward/mean" in record]


if __name__ == "__main__":
    main()
