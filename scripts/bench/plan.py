"""How well `asyncrl plan` predicts, and how long a play takes.

    python scripts/bench/plan.py             # the configurations of plan_configurations.yaml: predicted, then measured
    python scripts/bench/plan.py --only 4    # one of them, by its place
    python scripts/bench/plan.py --resume    # those that an interrupted one has left
    python scripts/bench/plan.py --again     # all predicted again, for the runs that bench/work/plan has
    python scripts/bench/plan.py --speed     # CPU seconds of a play of 50,000 trajectories of three turns

Each base is run once and fitted; each configuration is predicted from its base before it is run. Prints the error of
seconds per step, mean staleness and share of dropped groups, and writes bench/results/plan.json; each is in
bench/results/plan.part.json as soon as it is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
WORK = ROOT / "bench" / "work" / "plan"
"""The runs."""
BASE = {
    "actors.count": 1, "actors.slots": 32, "learner.groups_per_step": 8, "buffer.max_staleness": 2,
    "buffer.capacity": 1024, "buffer.keep": "all", "learner.lr": 0.0, "eval.tasks": 0, "tracking.rollouts": 0,
}  # fmt: skip
"""Over configs/quickstart.yaml. A learning rate of 0 keeps lengths as they are."""


class Sleeping:
    """An environment of two turns whose steps sleep for an exponential time of this mean."""

    tools = ()

    def __init__(self, mean_s: float = 0.5) -> None:
        self._mean_s, self._turns, self._rng = mean_s, 0, random.Random(0)

    async def reset(self, task: Any) -> list[dict[str, str]]:
        self._turns, self._rng = 0, random.Random(f"{task['id']}/{task.get('episode', 0)}")
        return [{"role": "user", "content": "12 + 7 ="}]

    async def step(self, message: Any) -> Any:
        from asyncrl.actors.envs.protocol import Turn

        await asyncio.sleep(self._rng.expovariate(1 / self._mean_s))
        self._turns += 1
        if self._turns == 1:
            return Turn(messages=[{"role": "user", "content": "3 + 4 ="}])
        return Turn(reward=float(len(str(message["content"])) % 2), done=True)

    async def close(self) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="training steps per run")
    parser.add_argument("--only", type=int, nargs="*", help="places of the configurations, from 0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--resume", action="store_true", help="go on with what plan.part.json and bench/work/plan have")
    parser.add_argument("--again", action="store_true", help="predict anew; run only what bench/work/plan lacks")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "plan.json")
    args = parser.parse_args()
    if args.speed:
        print(json.dumps(speed(args.seed), indent=1))
        return
    from results import finish, keep, kept

    chosen = yaml.safe_load(Path(__file__).with_name("plan_configurations.yaml").read_text())
    of_it = {"steps": args.steps, "seed": args.seed}
    rows = measured_before(kept(args.out), of_it, chosen["configurations"]) if args.resume else []
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "machine": platform.processor()}
    fitted: dict[str, Any] = {}
    for place, configuration in enumerate(chosen["configurations"]):
        if (args.only is not None and place not in args.only) or place in [row["place"] for row in rows]:
            continue
        base = configuration["base"]
        if base not in fitted:
            fitted[base] = fit_of(made(f"base-{base}", BASE | chosen["bases"][base], args, args.seed + 100))
        rows.append(compared(place, configuration, BASE | chosen["bases"][base], fitted[base], args))
        print(_line(rows[-1]), flush=True)
        keep(args.out, of_it | {"machine": machine | {"load": os.getloadavg()}, "rows": rows})
    finish(args.out, of_it | {"machine": machine | {"load": os.getloadavg()}, "rows": rows})


def measured_before(found: Any, of_it: dict[str, int], configurations: list[Any]) -> list[dict[str, Any]]:
    """The rows of an interrupted measurement with these steps and this seed, of configurations that are the same."""
    if found is None:
        return []
    if (had := {name: found.get(name) for name in of_it}) != of_it:
        raise SystemExit(f"--resume: what is there has {had}, asked for is {of_it}: give the same, or begin anew.")
    rows: list[dict[str, Any]] = found["rows"]
    return [row for row in rows if configurations[row["place"]] == row["configuration"]]


def made(name: str, changes: dict[str, Any], args: Any, seed: int, join: dict[str, int] | None = None) -> Path:
    """The folder of a run that is there already, where the flags allow that, else of a new one."""
    there = ended(name, changes, args.steps, seed) if args.resume or args.again else None
    return there or launched(name, changes, args.steps, seed, join)


def ended(name: str, changes: dict[str, Any], steps: int, seed: int) -> Path | None:
    """A run that is there, whole, and has this configuration; None: there is none. Of an actor that joined later it
    knows nothing: the name says which run that is."""
    from asyncrl.config import Config
    from asyncrl.run_folder import RunFolder

    run = WORK / name
    if not (run / "summary.json").is_file():
        return None
    wanted = Config.load(ROOT / "configs" / "quickstart.yaml", _flags(name, changes, steps, seed))
    return run if RunFolder.existing(run).load_config() == wanted else None


def fit_of(run: Path) -> Any:
    """The calibrated times of a run."""
    from asyncrl.plan.calibrate import System, calibrated
    from asyncrl.plan.command import CALIBRATION
    from asyncrl.plan.fitting.fit import fit
    from asyncrl.plan.fitting.record import read
    from asyncrl.plan.setting import Setting, domains, host_cores
    from asyncrl.run_folder import RunFolder

    record = read(RunFolder.existing(run))
    system = System(record.config, domains(record.config, host_cores()))
    return calibrated(fit(record), system, Setting.of(record.config), CALIBRATION)


def compared(place: int, configuration: dict[str, Any], base: dict[str, Any], times: Any, args: Any) -> dict[str, Any]:
    """One configuration: predicted, then measured."""
    from asyncrl.config import Config
    from asyncrl.plan.calibrate import System
    from asyncrl.plan.fitting.fit import fit
    from asyncrl.plan.fitting.record import read
    from asyncrl.plan.playing.simulate import Joins, Length
    from asyncrl.plan.setting import Setting, domains, host_cores
    from asyncrl.run_folder import RunFolder

    join = configuration.get("join")
    changes = base | {k: v for k, v in configuration.items() if k not in ("base", "join")}
    config = Config.load(ROOT / "configs" / "quickstart.yaml", _resolved(changes))
    system = System(config, domains(config, host_cores()))
    joins = Joins(**join) if join else None
    played, _ = system.play(times, Setting.of(config), Length(4, args.steps - 5), args.seed, joins)
    run = made(f"measured-{place}", changes, args, args.seed, join)
    measured = fit(read(RunFolder.existing(run))).measured
    pairs = {
        "step_s": (played.step_s, measured.step_s), "staleness": (played.staleness_mean, measured.staleness),
        "dropped": (played.dropped, measured.dropped),
    }  # fmt: skip
    stuck = {"stuck": played.stuck} if played.stuck else {}
    return {"place": place, "configuration": configuration, "predicted_measured": pairs} | stuck


def _line(row: dict[str, Any]) -> str:
    parts = [
        f"{name} {predicted:.3f} / {measured:.3f}" + (f" ({predicted / measured - 1:+.0%})" if measured else "")
        for name, (predicted, measured) in row["predicted_measured"].items()
    ]
    parts += [f"the play got stuck: {row['stuck']}"] if "stuck" in row else []
    return f"[{row['place']}] {row['configuration']}: {', '.join(parts)}"


def _resolved(changes: dict[str, Any]) -> dict[str, Any]:
    """`plan.py:Sleeping` is this file, wherever it is started."""
    here = str(Path(__file__).resolve())
    return {k: here + v[len("plan.py") :] if str(v).startswith("plan.py:") else v for k, v in changes.items()}


def launched(name: str, changes: dict[str, Any], steps: int, seed: int, join: dict[str, int] | None = None) -> Path:
    """One `asyncrl launch`; gives its folder. With `join`, actors are added when it has reached that version."""
    work = WORK
    run = work / name
    shutil.rmtree(run, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    flags = _flags(name, changes, steps, seed)
    words = [word for path, value in flags.items() for word in (f"--{path}", str(value))]
    command = [sys.executable, "-m", "asyncrl", "launch", "--config", str(ROOT / "configs" / "quickstart.yaml"), *words]
    with (work / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=work)
        try:
            if join:
                _add(process, run, join)
            if process.wait(1800):
                raise SystemExit(f"{name} failed: see {log.name}")
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)
    return run


def _flags(name: str, changes: dict[str, Any], steps: int, seed: int) -> dict[str, Any]:
    """Fields over configs/quickstart.yaml."""
    return _resolved(changes) | {
        "learner.steps": steps, "launch.name": name, "launch.runs_dir": str(WORK), "launch.seed": seed,
    }  # fmt: skip


def _add(process: subprocess.Popen[bytes], run: Path, join: dict[str, int]) -> None:
    """Adds the actors once the run has reached the version."""
    metrics = run / "metrics.jsonl"
    while process.poll() is None:
        lines = metrics.read_text().splitlines() if metrics.is_file() else []
        if lines and json.loads(lines[-1])["step"] >= join["version"]:
            add = [sys.executable, "-m", "asyncrl", "actors", "add", str(join["count"]), "--run", str(run)]
            subprocess.run(add, check=True, timeout=120)
            return
        time.sleep(0.2)


def speed(seed: int, trajectories: int = 50_000) -> dict[str, float]:
    """CPU seconds of a play of so many trajectories of three turns, and of its puts and tickets alone."""
    from asyncrl.buffer.core import Buffer
    from asyncrl.buffer.rules import Rules
    from asyncrl.plan.playing.simulate import Length, Play
    from asyncrl.plan.playing.world import Modelled
    from asyncrl.plan.setting import Setting
    from asyncrl.plan.times import EngineTimes, Episode, LearnerTimes, Times, Turn

    rng = random.Random(seed)
    turns = [tuple(Turn(20, rng.randint(10, 60), rng.lognormvariate(-1, 1)) for _ in range(3)) for _ in range(800)]
    groups = [tuple(Episode("e", t, 0.01, 200, 3000, 1.0, "done") for t in turns[i : i + 8]) for i in range(0, 800, 8)]
    times = Times(groups, EngineTimes(0.004, 0.0002, 0.0001), LearnerTimes(0.1, 1e-5, 0, 0, 0, 0), 0.05, 0, 0, 0)
    setting = Setting(8, 64, 64, 2, 1, "fifo")
    rules = Rules(steps=1 << 30, groups_per_step=64, group_size=8, capacity=4096, slots=64, lease_s=1e12)
    inside = {"accept": 0.0, "issue": 0.0, "batch": 0.0}
    calls = dict.fromkeys(inside, 0)
    for name in inside:
        setattr(Buffer, name, _timed(getattr(Buffer, name), name, inside, calls))
    began = time.process_time()
    play = Play(rules, setting, lambda clock: Modelled(clock, times, [], random.Random(seed), (1, 1)),
                Length(0, 1 << 30, trajectories))  # fmt: skip
    play.run()
    seconds = time.process_time() - began
    return {
        "trajectories": trajectories, "cpu_s": seconds, "us_per_trajectory": seconds / trajectories * 1e6,
        "us_per_put": inside["accept"] / calls["accept"] * 1e6,
        "us_of_tickets_per_trajectory": inside["issue"] / trajectories * 1e6,
        "us_of_batches_per_trajectory": inside["batch"] / trajectories * 1e6,
    }  # fmt: skip


def _timed(call: Any, name: str, inside: dict[str, float], calls: dict[str, int]) -> Any:
    def timed(*arguments: Any) -> Any:
        began = time.process_time()
        result = call(*arguments)
        inside[name] += time.process_time() - began
        calls[name] += 1
        return result

    return timed


if __name__ == "__main__":
    main()
