"""What the record of `asyncrl trace` costs a run: the CPU of its spans, as a share of the CPU of the whole run.

    span      reports with and without spans, in turns, from a real Reporter over its socket to a real Collector that
              writes `spans.jsonl`: the difference, per span, of both ends together
    run       the quickstart, `--steps` training steps: the spans that it reported, and the CPU of all its processes

The share is spans x CPU per span / CPU of the run. Training steps per second cannot show it: their noise from run to
run is larger than what is measured. Times are CPU seconds, which a busy machine changes little.
Run it from the root of the repository. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.run_folder import RunFolder
from asyncrl.tracking import spans
from asyncrl.tracking.collector import Collector
from asyncrl.tracking.reporter import Reporter

ROOT = Path(__file__).parents[2]
PER_STEP = 12
"""Spans between two reports of metrics, about as many as a training step has."""


def per_span(folder: Path, reports: int, rounds: int) -> dict[str, Any]:
    """CPU microseconds per span, at both ends together: `us` of each round, `median_us`."""
    run = RunFolder.create(folder / "run", Config())
    collector = Collector(run, Config())
    reporter = Reporter(run.address("launcher"), "learner")
    differences = []
    try:
        for _ in range(rounds):
            cpu = {}
            for with_spans in (True, False):
                begun = time.process_time()
                for number in range(reports):
                    for _ in range(PER_STEP if with_spans else 0):
                        reporter.span("forward and backward", 0.125, number)
                    reporter.metrics({"reward/mean": 0.5})
                    collector.poll(0.001)
                cpu[with_spans] = time.process_time() - begun
            differences.append((cpu[True] - cpu[False]) / (reports * PER_STEP))
    finally:
        reporter.close()
        collector.close()
        run.remove_temporary()
    written = sum(1 for _ in spans.read(run.spans))
    assert written >= reports * PER_STEP, f"only {written} spans were written"
    return {"us": [round(1e6 * each, 2) for each in differences], "median_us": 1e6 * statistics.median(differences)}


def a_run(folder: Path, steps: int) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "asyncrl", "launch", "--config", "quickstart", "--learner.steps", str(steps),
        "--eval.tasks", "20", "--launch.runs-dir", str(folder), "--launch.name", "run",
    ]  # fmt: skip
    before = _children_cpu_s()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout[-3000:] + done.stderr[-3000:])
    found = list(spans.read(RunFolder(folder / "run").spans))
    return {"steps": steps, "spans": len(found), "cpu_s": round(_children_cpu_s() - before, 1)}


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reports", type=int, default=2000, help="reports of metrics per measurement")
    parser.add_argument("--rounds", type=int, default=5, help="measurements; their median is given")
    parser.add_argument("--steps", type=int, default=40, help="at most 50: what spans.jsonl keeps")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="asyncrl-trace-") as folder:
        span = per_span(Path(folder) / "span", given.reports, given.rounds)
        run = a_run(Path(folder) / "runs", given.steps)
    results = {
        "machine": platform.machine(), "python": platform.python_version(), "cores": os.cpu_count(),
        "load": os.getloadavg()[0], "span": span, "run": run,
        "share_of_the_cpu": run["spans"] * span["median_us"] / 1e6 / run["cpu_s"],
    }  # fmt: skip
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
