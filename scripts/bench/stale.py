"""What staleness costs each objective: samples of exactly a given lag, and then real asynchronous runs.

One process, a ring of old weights: at version v every episode is sampled by version v - lag (by version 0 until there
is one so old). The engine, the episodes, the training step and the objective are those of a run; the task is the
quickstart's with smaller batches and fewer steps. Each run ends with held-out tasks played by its last weights.

    python scripts/bench/stale.py            # objectives x lags x seeds; what is on the disk already is not run again
    python scripts/bench/stale.py --real     # one `asyncrl launch` per bound, with the staleness that it measured
    python scripts/bench/stale.py --report   # tables and plot of what is on the disk

Writes bench/results/stale/*.json, one per run, and docs/images/stale.png.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from fixed_lag import train
from intervals import interval

from asyncrl.config import Config
from asyncrl.model import resolve_path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "stale"
IMAGE = ROOT / "docs" / "images" / "stale.png"
BOUNDS = (0, 1, 4)

AS_PUBLISHED = {"proximal": "behaviour", "corrections": [], "unsafe": True}
"""The ratio is against who sampled the token, and nothing else corrects."""
OBJECTIVES: dict[str, dict[str, Any]] = {
    "uncorrected": {"loss": "ppo", "corrections": [], "unsafe": True},
    "ppo": {"loss": "ppo", **AS_PUBLISHED},
    "decoupled_tis": {"loss": "decoupled_ppo", "corrections": [{"name": "tis", "level": "token", "cap": 2.0}]},
    "decoupled_icepop": {"loss": "decoupled_ppo", "corrections": [{"name": "icepop", "low": 0.5, "high": 5.0}]},
    "gspo": {"loss": "gspo", "aggregation": "seq_mean_token_mean", **AS_PUBLISHED},
    "cispo": {"loss": "cispo", **AS_PUBLISHED},
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Of one run with a fixed lag."""

    objective: str
    lag: int
    seed: int
    steps: int
    groups: int
    eval_tasks: int

    @property
    def path(self) -> Path:
        return RESULTS / f"{self.objective}-lag{self.lag}-seed{self.seed}.json"

    def config(self) -> Config:
        learner = {"steps": self.steps, "groups_per_step": self.groups} | OBJECTIVES[self.objective]
        return _quickstart(learner, max_staleness=self.lag, tasks=self.eval_tasks, seed=self.seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objectives", nargs="+", default=list(OBJECTIVES), choices=list(OBJECTIVES))
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 4, 16])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="ten at most")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=10, help="prompt groups per step, of 8 episodes each")
    parser.add_argument("--eval-tasks", type=int, default=200)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()

    RESULTS.mkdir(parents=True, exist_ok=True)
    plans = [
        Plan(objective, lag, seed, args.steps, args.groups, args.eval_tasks)
        for seed in args.seeds
        for lag in args.lags
        for objective in args.objectives
    ]
    if args.real:
        for bound in BOUNDS:
            learner = {"steps": args.steps, "groups_per_step": args.groups, "checkpoint_every": args.steps}
            config = _quickstart(learner, max_staleness=bound, tasks=args.eval_tasks, seed=args.seeds[0])
            _kept(RESULTS / f"real-bound{bound}.json", config, lambda config=config: real(config))
    elif not args.report:
        for n, plan in enumerate(plans, 1):
            result = _kept(plan.path, plan.config(), lambda plan=plan: train(plan.config(), plan.lag))
            print(f"[{n}/{len(plans)}] {plan.path.stem}: {_short(result)}", flush=True)
    report(plans)


def real(config: Config) -> dict[str, Any]:
    """One `asyncrl launch` with the default objective."""
    work = ROOT / "bench" / "work" / "stale"
    work.mkdir(parents=True, exist_ok=True)
    name = f"bound{config.buffer.max_staleness}-{time.strftime('%H%M%S')}"
    path = work / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    asyncrl = [sys.executable, "-m", "asyncrl", "launch", "--config", str(path), "--launch.name", name]
    subprocess.run(asyncrl, cwd=work, check=True, stdout=subprocess.DEVNULL, timeout=900)
    folder = work / "runs" / name
    summary = json.loads((folder / "summary.json").read_text())
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in records if "staleness/mean" in r]
    return {
        "success": summary["held_out_success_end"],
        "staleness_mean": statistics.fmean(r["staleness/mean"] for r in steps),
        "staleness_max": max(r["staleness/max"] for r in steps),
        "sequence_ess": statistics.fmean(r["correction/sequence_ess"] for r in steps),
        "weights_ess": statistics.fmean(r["correction/ess"] for r in steps),
        "trained_s": steps[-1]["wall_s"] - steps[0]["wall_s"],
        "wall_s": summary["wall_s"],
    }


def report(plans: Sequence[Plan]) -> None:
    """Markdown tables on the screen, and the plot."""
    rows = []
    for objective in OBJECTIVES:
        for lag in sorted({p.lag for p in plans}):
            found = [
                json.loads(p.path.read_text())
                for p in plans
                if (p.objective, p.lag) == (objective, lag) and p.path.exists()
            ]
            if found:
                rows.append((objective, lag, found))
    print("\n| objective | lag | success, 95% interval | seeds | ESS, tokens | ESS, rows | skipped | wall s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for objective, lag, found in rows:
        mean, low, high = interval([f["success"] for f in found])
        seeds = ", ".join(f"{f['success']:.3f}" for f in found)
        means = {k: statistics.fmean(f[k] for f in found) for k in ("ratio_ess", "sequence_ess", "skipped", "wall_s")}
        print(
            f"| `{objective}` | {lag} | {mean:.3f} ({low:.3f} to {high:.3f}) | {seeds} | {means['ratio_ess']:.3f} | "
            f"{means['sequence_ess']:.3f} | {means['skipped']:.1f} | {means['wall_s']:.1f} |"
        )
    runs = [f for _, _, found in rows for f in found]
    wall_min, cpu_min = (sum(f[key] for f in runs) / 60 for key in ("wall_s", "cpu_s"))
    print(f"\n{len(runs)} runs: {wall_min:.1f} minutes, {cpu_min:.1f} CPU minutes")

    if other := sum(json.loads(p.path.read_text())["key"] != _key(p.config()) for p in plans if p.path.exists()):
        print(f"{other} of them were made with another config or other initial weights than those of today")

    measured = {b: json.loads(p.read_text()) for b in BOUNDS if (p := RESULTS / f"real-bound{b}.json").exists()}
    if measured:
        print("\n| max_staleness | staleness, mean | max | success | ESS, weights | ESS, rows | trained in s |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
    for bound, f in measured.items():
        print(
            f"| {bound} | {f['staleness_mean']:.2f} | {f['staleness_max']:.0f} | {f['success']:.3f} | "
            f"{f['weights_ess']:.3f} | {f['sequence_ess']:.3f} | {f['trained_s']:.1f} |"
        )
    if rows:
        plot(rows, measured)


def plot(rows: Sequence[tuple[str, int, list[dict[str, Any]]]], measured: dict[int, dict[str, Any]]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from asyncrl.tracking.report.plots import COLOURS

    lags = sorted({lag for _, lag, _ in rows})
    figure = Figure(figsize=(9, 3.6), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, objective in enumerate(dict.fromkeys(name for name, _, _ in rows)):
        mine = [(lags.index(lag), found) for name, lag, found in rows if name == objective]
        at = [x + 0.06 * (i - 2.5) for x, _ in mine]
        shares = [[f["success"] for f in found] for _, found in mine]
        means = [statistics.fmean(s) for s in shares]
        ends = [
            [m - min(s) for m, s in zip(means, shares, strict=True)],
            [max(s) - m for m, s in zip(means, shares, strict=True)],
        ]
        left.errorbar(
            at, means, ends, marker="o", markersize=4, capsize=2, linewidth=1.2, color=COLOURS[i], label=objective
        )
        ess = [statistics.fmean(f["sequence_ess"] for f in found) for _, found in mine]
        right.plot(at, ess, marker="o", markersize=4, linewidth=1.2, color=COLOURS[i], label=objective)
    for bound, f in measured.items():
        x = _between(f["staleness_mean"], lags)
        left.plot(
            x, f["success"], "k*", markersize=9, label="asynchronous, default" if bound == min(measured) else None
        )
    left.set_title("Held-out success after training (mean; lowest to highest seed)", fontsize=9, loc="left")
    right.set_title("Effective sample size of the ratio learner / sampler, rows", fontsize=9, loc="left")
    for axes in (left, right):
        axes.set_xticks(range(len(lags)), [str(lag) for lag in lags])
        axes.set_xlabel("lag in training steps", fontsize=9)
        axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    left.legend(fontsize=7.5, frameon=False)
    FigureCanvasAgg(figure).print_png(str(IMAGE))
    print(f"\nwrote {IMAGE}")


def _between(staleness: float, lags: Sequence[int]) -> float:
    """Place on an axis whose ticks are the lags."""
    for i, (low, high) in enumerate(pairwise(lags)):
        if low <= staleness <= high:
            return i + (staleness - low) / (high - low)
    return float(len(lags) - 1)


def _quickstart(learner: dict[str, Any], *, max_staleness: int, tasks: int, seed: int) -> Config:
    """configs/quickstart.yaml, made smaller."""
    config = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    config["learner"] |= learner
    config["buffer"] |= {"max_staleness": max_staleness}
    config["eval"] |= {"tasks": tasks, "samples": 1, "greedy": False}
    config["launch"] = {"seed": seed}
    return Config.model_validate(config)


def _key(config: Config) -> str:
    weights = (resolve_path(config.model) / "model.safetensors").read_bytes()
    settings = config.model_dump_json(exclude_defaults=True).encode()
    return hashlib.blake2b(settings + weights, digest_size=8).hexdigest()


def _kept(path: Path, config: Config, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What is in the file, if it was made with the same config and initial weights; else what `make` makes, written."""
    key = _key(config)
    if path.exists() and (found := json.loads(path.read_text()))["key"] == key:
        return found
    made = {"key": key} | make()
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps(made) + "\n")
    scratch.replace(path)
    return made


def _short(result: dict[str, Any]) -> str:
    names = ("success", "ratio_ess", "sequence_ess", "skipped", "wall_s", "cpu_s")
    return ", ".join(f"{name} {result[name]:.3g}" for name in names)


if __name__ == "__main__":
    main()
