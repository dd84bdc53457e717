"""`buffer.max_staleness: auto` and `launch.tuning: auto` in real runs, from bad starts, against the best fixed setting.

    python scripts/bench/auto_measured.py --choose    # the best fixed pair, on seed 100: about 9 minutes
    python scripts/bench/auto_measured.py             # then three arms, five repeats, interleaved: about 25 minutes
    python scripts/bench/auto_measured.py --resume    # what an interrupted one has left, with either
    python scripts/bench/auto_measured.py --report

The quickstart's task with tools of long-tailed latency and small batches; repeat r has seed r. Compared with the fixed
pair of the same repeat are the trained policy tokens/s from step 20 on, and, over all repeats, the success on held-out
tasks at the end. The automatic bound begins with 1, the automatic slots with 16: what these cost is measured with
--choose, too. Every run is audited. Writes bench/results/auto_measured.json, and with --choose auto_chosen.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from intervals import interval
from launching import ROOT, Records, launched, rate
from results import finish, keep, kept, processor

WORK = ROOT / "bench" / "work" / "auto_measured"
AFTER = 20
"""Training steps before the first that is measured."""
CHOSEN_ON = 100
"""Seed of the runs among which the fixed pair is chosen."""
PAIRS = ((16, 1), (64, 1), (32, 8), (64, 4), (64, 8), (128, 4), (128, 8), (256, 8))
"""Slots and bound, of which the best is what the automatic ones are compared with. The first two are what they begin
with, held."""
SMALL = {
    "env.options.tool_latency_s": "lognormal:0.2,1.0", "actors.count": 1, "buffer.capacity": 2048,
    "learner.groups_per_step": 4, "learner.group_size": 8, "eval.greedy": False, "tracking.rollouts": 0,
}  # fmt: skip
"""Over configs/quickstart.yaml, whose learning rate and schedule stay."""


def fixed(slots: int, bound: int) -> dict[str, Any]:
    return {"actors.slots": slots, "buffer.max_staleness": bound}


def arms(slots: int, bound: int) -> dict[str, dict[str, Any]]:
    """What is compared with the best fixed pair, which is the first of them."""
    return {
        "fixed": fixed(slots, bound),
        "bound auto": {"actors.slots": slots, "buffer.max_staleness": "auto"},
        "slots and bound auto": {"actors.slots": "auto", "buffer.max_staleness": "auto", "launch.tuning": "auto"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60, help=f"training steps per run, of which {AFTER} do not count")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    args = parser.parse_args()
    if args.steps <= AFTER + 2:
        parser.error(f"--steps is {args.steps}: the first {AFTER} do not count, so give more than {AFTER + 2}.")
    chosen = args.results / "auto_chosen.json"
    out = chosen if args.choose else args.results / "auto_measured.json"
    if args.report:
        found = json.loads(out.read_text()) if out.is_file() else kept(out)
        print(report(found["rows"]) if found else f"{out} is not there")
        return
    if args.choose:
        wanted = {f"slots {slots}, bound {bound}": fixed(slots, bound) for slots, bound in PAIRS}
        found = measure(out, args, wanted, [CHOSEN_ON], {"eval.tasks": 0})
        best = best_of(found["rows"])
        finish(out, found | {"best": best})
        print(f"best: slots {best[0]}, bound {best[1]}")
    elif not chosen.is_file():
        raise SystemExit(f"{chosen} is not there: choose the fixed pair first, with --choose.")
    else:
        best = json.loads(chosen.read_text())["best"]
        found = measure(out, args, arms(*best), range(args.repeats), {})
        finish(out, found)
    print("\n" + report(found["rows"]))


def measure(
    out: Path, args: Any, wanted: Mapping[str, Mapping[str, Any]], seeds: Sequence[int], more: Mapping[str, Any]
) -> dict[str, Any]:
    """Every setting with every seed, in an order that begins with another one for each; what is there stays."""
    machine = {"cpu": processor(), "cores": os.cpu_count(), "python": platform.python_version()}
    found = (kept(out) if args.resume else None) or {"machine": machine, "rows": []}
    for name, flags, seed in left(wanted, seeds, found["rows"], {**SMALL, **more, "learner.steps": args.steps}):
        row = {"arm": name, "seed": seed, "flags": flags} | measured(flags | {"launch.seed": seed})
        found["rows"].append(row)
        keep(out, found)
        print(f"[{seed}] {name}: {_short(row)}", flush=True)
    return dict(found)


def left(
    wanted: Mapping[str, Mapping[str, Any]],
    seeds: Sequence[int],
    rows: Sequence[Mapping[str, Any]],
    common: Mapping[str, Any],
) -> list[tuple[str, dict[str, Any], int]]:
    """Name, flags and seed of what is to be measured. Raises SystemExit for rows that had other flags."""
    there = {(row["arm"], row["seed"]): row["flags"] for row in rows}
    ordered = []
    for n, seed in enumerate(seeds):
        names = list(wanted)[n % len(wanted) :] + list(wanted)[: n % len(wanted)]
        for name in names:
            flags = {**common, **wanted[name]}
            had = there.get((name, seed))
            if had is not None and had != flags:
                raise SystemExit(f"--resume: {name} with seed {seed} had {had}, asked for is {flags}: begin anew.")
            if had is None:
                ordered.append((name, flags, seed))
    return ordered


def measured(flags: Mapping[str, Any]) -> dict[str, Any]:
    """One run, to its end."""
    run = WORK / "run"
    found = [record for record in launched(run, flags) if "staleness/mean" in record]
    audit = subprocess.run(
        [sys.executable, "-m", "asyncrl", "audit", str(run)], capture_output=True, text=True, timeout=600
    )
    if audit.returncode:
        raise SystemExit(f"the audit of {run} found something: {(audit.stdout + audit.stderr)[-2000:]}")
    summary = json.loads((run / "summary.json").read_text())
    return from_records(found) | {"success": summary["held_out_success_end"], "load": os.getloadavg()[0]}


def from_records(found: Records) -> dict[str, Any]:
    """Figures from step 20 on. The last step's record may follow the evaluation and the checkpoint: it is left out."""
    first, last = found[AFTER - 1], found[-2]
    counted = found[AFTER:-1]
    return {
        "tokens_per_s": rate(first, last),
        "step_s": (last["wall_s"] - first["wall_s"]) / (last["step"] - first["step"]),
        "first_tokens_per_s": rate(found[1], found[6]),
        "staleness": fmean(record["staleness/mean"] for record in counted),
        "bounds": _each("staleness/bound", found), "slots": _each("throughput/slots_in_force", found),
    }  # fmt: skip


def _each(name: str, found: Records) -> list[int] | None:
    """The value of each step, where it was chosen while the run went."""
    return [int(record[name]) for record in found] if all(name in record for record in found) else None


def best_of(rows: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Slots and bound of the fastest pair."""
    flags = max(rows, key=lambda row: row["tokens_per_s"])["flags"]
    return flags["actors.slots"], flags["buffer.max_staleness"]


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of the arms, each against the first with the same seed."""
    names = list(dict.fromkeys(row["arm"] for row in sorted(rows, key=lambda row: row["arm"] != "fixed")))
    lines = [
        "| arm | repeats | trained tokens/s, median | of fixed: mean, least | staleness | bounds, from step 20 on | "
        "slots | success: mean, 95% interval |",
        "| --- | ---: | ---: | ---: | ---: | --- | --- | --- |",
    ]
    reference = {row["seed"]: row["tokens_per_s"] for row in rows if row["arm"] == "fixed"}
    for name in names:
        own = [row for row in rows if row["arm"] == name]
        shares = [row["tokens_per_s"] / reference[row["seed"]] for row in own if row["seed"] in reference]
        of_fixed = f"{fmean(shares):.1%}, {min(shares):.1%}" if shares else ""
        bounds, slots = (_range(own, key) for key in ("bounds", "slots"))
        lines.append(
            f"| {name} | {len(own)} | {median(row['tokens_per_s'] for row in own):.0f} | {of_fixed} | "
            f"{fmean(row['staleness'] for row in own):.2f} | {bounds} | {slots} | {_success(own)} |"
        )
    return "\n".join(lines + verdicts(rows))


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of each automatic arm: whether its mean success is within the interval of the fixed one."""
    by_arm: dict[str, list[float]] = {}
    for row in rows:
        if row["success"] is not None:
            by_arm.setdefault(row["arm"], []).append(row["success"])
    reference = by_arm.pop("fixed", [])
    if len(reference) < 2:
        return []
    _, low, high = interval(reference)
    said = [""]
    for name, successes in by_arm.items():
        mean = fmean(successes)
        where = "within" if low <= mean <= high else "outside"
        said.append(f"{name}: mean success {mean:.3f}, {where} the interval of the fixed pair, {low:.3f} to {high:.3f}")
    return said


def _success(own: Sequence[Mapping[str, Any]]) -> str:
    values = [row["success"] for row in own if row["success"] is not None]
    if not values:
        return ""
    mean, low, high = interval(values)
    return f"{mean:.3f}, {low:.3f} to {high:.3f}"


def _range(own: Sequence[Mapping[str, Any]], key: str) -> str:
    values = [value for row in own if row[key] is not None for value in row[key][AFTER:]]
    return f"{min(values)} to {max(values)}" if values else ""


def _short(row: Mapping[str, Any]) -> str:
    names = ("tokens_per_s", "first_tokens_per_s", "step_s", "staleness", "success")
    return ", ".join(f"{name} {row[name]:.3g}" for name in names if row[name] is not None)


if __name__ == "__main__":
    main()
