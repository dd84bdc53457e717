"""The command `asyncrl plan`: settings of a run, played on a virtual clock."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from asyncrl.cli.parsing import parse
from asyncrl.errors import ConfigError

Arg = tyro.conf.arg


@dataclass(frozen=True)
class _Options:
    try_actors: Annotated[tuple[int, ...], Arg(help="Numbers of actors to try.", metavar="N ...")] = ()
    try_slots: Annotated[tuple[int, ...], Arg(help="Slots of one actor to try.", metavar="N ...")] = ()
    try_groups_per_step: Annotated[tuple[int, ...], Arg(help="Groups of a training step to try.", metavar="N ...")] = ()
    try_max_staleness: Annotated[tuple[int, ...], Arg(help="Bounds on staleness to try.", metavar="S ...")] = ()
    try_every: Annotated[tuple[int, ...], Arg(help="Cadences of publication to try.", metavar="N ...")] = ()
    try_sampler: Annotated[tuple[str, ...], Arg(help="Samplers to try.", metavar="NAME ...")] = ()
    try_ranks: Annotated[tuple[int, ...], Arg(help="Ranks of the learner to try.", metavar="N ...")] = ()
    try_tuning: Annotated[
        tuple[Literal["off", "auto"], ...], Arg(help="Fixed slots and bound, or chosen ones.", metavar="{off,auto} ...")
    ] = ()
    steps: Annotated[int, Arg(help="Training steps measured in each play.")] = 16
    seeds: Annotated[int, Arg(help="Plays of the settings that matter, each with the episodes drawn again.")] = 3
    cores: Annotated[int | None, Arg(help="Cores of the host; default: those of this one.")] = None
    gpus: Annotated[
        int | None, Arg(help="Divide so many GPUs between actors and ranks of the learner.", metavar="N")
    ] = None
    json: Annotated[bool, Arg(help="Print JSON instead of a table.")] = False
    write: Annotated[
        Path | None, Arg(help="Write the run's configuration with the picked values to this file.", metavar="FILE.yaml")
    ] = None


def plan(words: list[str]) -> int:
    """Plays a run's times on a virtual clock under other settings, and recommends one."""

    @dataclass(frozen=True)
    class PlanRun(_Options):
        run: Annotated[tyro.conf.Positional[Path | None], Arg(help="A run folder, live or over.", metavar="RUN")] = None

    @dataclass(frozen=True)
    class PlanProbe(_Options):
        config: Annotated[Path | None, Arg(help="YAML file; flags override it.", metavar="FILE")] = None
        probe: Annotated[
            float, Arg(help="Run it for so many seconds first, from its first step on.", metavar="SECONDS")
        ] = 60.0
        debug: Annotated[bool, Arg(help="Show tracebacks of errors.")] = False

    of_config = any(word.partition("=")[0] in ("--config", "--probe") for word in words)
    if not of_config:
        about = f"{plan.__doc__} Instead of RUN, --config FILE --probe SECONDS runs a configuration for a while first."
        options: Any = tyro.cli(PlanRun, args=words, prog="asyncrl plan", description=about)
        if options.run is None:
            raise ConfigError("plan takes a run folder, or --config FILE --probe SECONDS.")
        _check(options)
        from asyncrl.run_folder import RunFolder

        run, own = RunFolder.existing(options.run), None
    else:
        options, flags = parse(PlanProbe, words, "plan", plan.__doc__)
        _check(options)
        if options.probe <= 0:
            raise ConfigError(f"--probe is {options.probe:g} seconds, expected more than 0.")
        from asyncrl.config import Config
        from asyncrl.launch import preflight
        from asyncrl.plan.probe import probe
        from asyncrl.plan.setting import refuse_supervised

        own = Config.load(options.config, flags)
        refuse_supervised(own)
        preflight.check(own)
        run = probe(own, options.probe)
        if not options.json:
            print(f"probed: {run.path}")
    from asyncrl.plan.command import Options
    from asyncrl.plan.command import plan as run_plan

    dimensions = ("actors", "slots", "groups_per_step", "max_staleness", "every", "sampler", "tuning", "ranks")
    given = {name: values for name in dimensions if (values := getattr(options, f"try_{name}"))}
    played = Options(given, options.steps, options.seeds, options.cores, options.gpus, options.json, options.write)
    return run_plan(run, played, own)


def _check(options: Any) -> None:
    """Raises ConfigError for a number out of its range."""
    least = {"steps": 4, "seeds": 1, "try_max_staleness": 0}
    most = {"steps": 10_000, "seeds": 100, "try_groups_per_step": 1_000_000}
    for name in (
        "steps",
        "seeds",
        "try_actors",
        "try_slots",
        "try_groups_per_step",
        "try_max_staleness",
        "try_every",
        "try_ranks",
    ):
        low, high, given = least.get(name, 1), most.get(name, 100_000), getattr(options, name)
        for value in given if isinstance(given, tuple) else (given,):
            if not low <= value <= high:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}: expected {low} to {high}.")
    if options.gpus is not None and (options.try_actors or options.try_ranks):
        raise ConfigError("--gpus divides GPUs between actors and ranks: leave out --try-actors and --try-ranks.")
    if options.gpus is not None and not 2 <= options.gpus <= 100_000:
        raise ConfigError(f"--gpus is {options.gpus}: expected 2 to 100000.")
    if options.cores is not None and options.cores < 1:
        raise ConfigError(f"--cores is {options.cores}: expected at least 1.")
