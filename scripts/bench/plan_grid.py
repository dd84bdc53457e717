"""Whether `asyncrl plan` picks well: its pick against the best of a measured grid of nine settings.

    python scripts/bench/plan_grid.py             # two workloads, nine settings, three repeats: about 25 minutes
    python scripts/bench/plan_grid.py --resume    # what an interrupted one has left
    python scripts/bench/plan_grid.py --report    # the tables of what is there

Of each workload one run is recorded, the setting in the middle of the grid, and `asyncrl plan` picks from its record
among slots x bounds. Then all nine are measured, in another order in each repeat: trained policy tokens/s of some
seconds that begin a while after the first training step. Recorded is seed 100; repeat r has seed r. Writes
bench/results/plan_grid.json; what there is so far is in plan_grid.part.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from launching import ROOT, Records, launched, rate
from results import finish, keep, kept, processor

WORK = ROOT / "bench" / "work" / "plan_grid"
BOUNDS = (0, 2, 8)
FEWEST = 3
"""Training steps that are measured at least."""
RECORDED = 100
"""Seed of the recorded run."""
COMMON = {
    "buffer.capacity": 2048, "learner.lr": 0.0, "learner.steps": 100_000, "eval.tasks": 0, "tracking.rollouts": 0,
}  # fmt: skip
"""Over configs/quickstart.yaml. A learning rate of 0 keeps lengths as they are."""


@dataclass(frozen=True, slots=True)
class Workload:
    slots: tuple[int, int, int]
    """Of one actor."""
    changes: Mapping[str, Any]

    @property
    def settings(self) -> list[tuple[int, int]]:
        """Slots and bound."""
        return [(slots, bound) for slots in self.slots for bound in BOUNDS]

    @property
    def middle(self) -> tuple[int, int]:
        return self.slots[1], BOUNDS[1]

    def flags(self, setting: tuple[int, int], seed: int) -> dict[str, Any]:
        own = {"actors.slots": setting[0], "buffer.max_staleness": setting[1], "launch.seed": seed}
        return COMMON | dict(self.changes) | own


WORKLOADS = {
    "sleeping tools": Workload(
        (8, 24, 48),
        {
            "env.options.tool_latency_s": "lognormal:0.3,1.0", "actors.count": 1,
            "learner.groups_per_step": 6, "learner.group_size": 4,
        },
    ),
    "shared cores": Workload(
        (8, 32, 64), {"actors.count": 2, "learner.groups_per_step": 8, "learner.group_size": 8}
    ),
}  # fmt: skip
"""In the second, tools answer at once, and two actors and the learner want both cores."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12.0, help="measured of each run")
    parser.add_argument("--settle", type=float, default=4.0, help="seconds from the first step on that are not")
    parser.add_argument("--record", type=float, default=45.0, help="seconds of the recorded run that are measured")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "plan_grid.json")
    args = parser.parse_args()
    if args.report:
        found = json.loads(args.out.read_text()) if args.out.is_file() else kept(args.out)
        print("\n\n".join(report(name, found) for name in found["planned"]) if found else "nothing is there")
        return
    of_it = {"seconds": args.seconds, "settle": args.settle, "record": args.record}
    found = begun(kept(args.out) if args.resume else None, of_it)
    for name in args.workloads:
        if name not in found["planned"]:
            found["planned"][name] = planned(WORKLOADS[name], name, args)
            keep(args.out, found)
            print(f"{name}: pick {found['planned'][name]['pick']}", flush=True)
    for repeat, name, setting in left(args.workloads, args.repeats, found["rows"]):
        row = measured(WORKLOADS[name], setting, repeat, args)
        found["rows"].append({"workload": name, "setting": setting, "repeat": repeat} | row)
        keep(args.out, found)
        print(f"[{repeat}] {name}, slots {setting[0]}, bound {setting[1]}: {_short(row)}", flush=True)
    finish(args.out, found)
    print("\n" + "\n\n".join(report(name, found) for name in args.workloads))


def begun(found: Any, of_it: dict[str, float]) -> dict[str, Any]:
    """What an interrupted measurement of the same seconds and workloads has left, or a new one."""
    grids = {name: {"slots": list(w.slots), "changes": dict(w.changes)} for name, w in WORKLOADS.items()}
    fresh = of_it | {"grids": grids}
    if found is None:
        machine = {"cpu": processor(), "cores": os.cpu_count(), "python": platform.python_version()}
        return fresh | {"machine": machine, "planned": {}, "rows": []}
    if (had := {key: found.get(key) for key in fresh}) != fresh:
        raise SystemExit(f"--resume: what is there has {had}, asked for is {fresh}: give the same, or begin anew.")
    return dict(found)


def left(
    workloads: Sequence[str], repeats: int, rows: Sequence[Mapping[str, Any]]
) -> list[tuple[int, str, tuple[int, int]]]:
    """What is to be measured: repeat, workload, setting. Every repeat has its own order."""
    there = {(row["repeat"], row["workload"], tuple(row["setting"])) for row in rows}
    wanted = []
    for repeat in range(repeats):
        each = [(repeat, name, setting) for name in workloads for setting in WORKLOADS[name].settings]
        random.Random(repeat).shuffle(each)
        wanted += each
    return [one for one in wanted if one not in there]


def planned(workload: Workload, name: str, args: Any) -> dict[str, Any]:
    """Records a run, and what `asyncrl plan` makes of it: its pick, and the tokens/s and staleness of all settings."""
    run = WORK / name.replace(" ", "-")
    flags = workload.flags(workload.middle, RECORDED) | {"buffer.keep": "all"}
    launched(run, flags, partial(_enough, settle=args.settle, seconds=args.record, fewest=12))
    tried = ["--try-slots", *map(str, workload.slots), "--try-max-staleness", *map(str, BOUNDS), "--json"]
    command = [sys.executable, "-m", "asyncrl", "plan", str(run), *tried]
    said = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=900).stdout)
    points = [
        {
            "setting": _setting(point), "tokens_per_s": point["mean"]["tokens_per_s"],
            "staleness": point["mean"]["staleness_mean"],
        }
        for point in said["points"]
    ]  # fmt: skip
    return {"pick": _setting(said["pick"]), "points": points, "recorded": said["measured"]}


def measured(workload: Workload, setting: tuple[int, int], repeat: int, args: Any) -> dict[str, float]:
    """One run of a setting."""
    enough = partial(_enough, settle=args.settle, seconds=args.seconds, fewest=FEWEST)
    found = launched(WORK / "measured", workload.flags(setting, repeat), enough)
    first = next(n for n, record in enumerate(found) if record["wall_s"] >= found[0]["wall_s"] + args.settle)
    return {
        "tokens_per_s": rate(found[first], found[-1]), "steps": len(found) - 1 - first,
        "seconds": found[-1]["wall_s"] - found[first]["wall_s"],
        "staleness": fmean(record["staleness/mean"] for record in found[first + 1 :]), "load": os.getloadavg()[0],
    }  # fmt: skip


def _enough(found: Records, settle: float, seconds: float, fewest: int) -> bool:
    """Whether so many seconds and steps are there, after the first that are left out."""
    if not found:
        return False
    counted = [record["wall_s"] for record in found if record["wall_s"] >= found[0]["wall_s"] + settle]
    return len(counted) > fewest and counted[-1] - counted[0] >= seconds


def report(name: str, found: Mapping[str, Any]) -> str:
    """The grid, as planned and as measured, and the pick as a share of the best."""
    plan = found["planned"][name]
    rates, staleness = {}, {}
    for setting in WORKLOADS[name].settings:
        rows = [r for r in found["rows"] if r["workload"] == name and tuple(r["setting"]) == setting]
        if rows:
            rates[setting] = [row["tokens_per_s"] for row in rows]
            staleness[setting] = median(row["staleness"] for row in rows)
    pick = tuple(plan["pick"])
    lines = [
        f"{name}: medians of {min(map(len, rates.values()), default=0)} (lowest to highest)", "",
        "| slots | bound | trained tokens/s: planned | measured | mean staleness: planned | measured | |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]  # fmt: skip
    best = max(rates, key=lambda setting: median(rates[setting]), default=None)
    for point in plan["points"]:
        setting = tuple(point["setting"])
        if setting in rates:
            each = rates[setting]
            marks = ", ".join(mark for mark, marked in (("pick", pick), ("best", best)) if setting == marked)
            lines.append(
                f"| {setting[0]} | {setting[1]} | {point['tokens_per_s']:.0f} | {median(each):.0f} ({min(each):.0f} to "
                f"{max(each):.0f}) | {point['staleness']:.2f} | {staleness[setting]:.2f} | {marks} |"
            )
    if best is not None and pick in rates:
        share = median(rates[pick]) / median(rates[best])
        lines += ["", f"the pick, slots {pick[0]} and bound {pick[1]}, has {share:.1%} of the best's tokens/s"]
    return "\n".join(lines)


def _setting(point: Mapping[str, Any]) -> list[int]:
    return [point["setting"]["slots"], point["setting"]["max_staleness"]]


def _short(row: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {value:.2f}" for key, value in row.items())


if __name__ == "__main__":
    main()
