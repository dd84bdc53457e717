"""`asyncrl plan`: reads a record, plays a grid of settings, prints what it comes to."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.plan import table
from asyncrl.plan.calibrate import System, calibrated
from asyncrl.plan.fitting.fit import Fit, fit
from asyncrl.plan.fitting.record import read
from asyncrl.plan.grid import Asked, Grid, grid
from asyncrl.plan.playing.simulate import Length
from asyncrl.plan.setting import Setting, domains, host_cores, refuse_supervised, splits
from asyncrl.run_folder import RunFolder

CALIBRATION = Length(4, 12)


@dataclass(frozen=True, slots=True)
class Options:
    given: Mapping[str, Sequence[Any]]
    """Values by dimension (`Setting`); without any the default grid."""
    steps: int
    """Training steps that are measured in each play."""
    seeds: int
    cores: int | None
    """Cores of the host; None: those of this one."""
    gpus: int | None
    """So many GPUs are divided between actors and the learner's ranks; None: those of the record stay."""
    as_json: bool
    write: Path | None


def plan(run: RunFolder, options: Options, own: Config | None = None) -> int:
    """`own`: the user's configuration, where the run is a probe of it, which has other evaluations and keeps more.

    Raises RunError for a record that says too little, ConfigError for a setting that cannot be.
    """
    if options.write is not None and options.write.exists():
        raise ConfigError(f"--write is {options.write}, which exists: give another file.")
    refuse_supervised(run.load_config())
    record = read(run)
    fitted = fit(record)
    config = record.config
    auto, bound = record.mean("throughput/slots"), record.mean("staleness/bound")
    slots = None if auto is None else max(1, round(auto / max(1, config.actors.count)))
    fixed = Setting.of(config, slots, None if bound is None else round(bound))
    fixed = replace(fixed, actors=fitted.measured.actors)
    base = fixed.as_set(config)
    system = System(config, domains(config, options.cores or host_cores()))
    times = calibrated(fitted, system, fixed, CALIBRATION)
    machines = () if options.gpus is None else splits(config, options.gpus)
    found = grid(
        system, times, base, Asked(options.given, fixed, machines), steps=options.steps, seeds=options.seeds,
        note=lambda setting: print(f"plays {setting}", file=sys.stderr) if sys.stderr.isatty() else None,
    )  # fmt: skip
    changes, _ = table.changed_config(config, found)
    as_json = json.dumps(table.as_json(fitted, found, changes), indent=2)
    part = run.plan.with_suffix(".json.part")  # the report draws it
    part.write_text(as_json)
    part.replace(run.plan)
    if options.as_json:
        print(as_json)
    else:
        print("\n".join(_text(fitted, found, changes, config)))
    if options.write is not None:
        values = table.changed_config(own or config, found)[1].model_dump(mode="json")
        values["launch"]["name"] = None
        options.write.write_text(yaml.safe_dump(values, sort_keys=False))
        if not options.as_json:
            whose = "your configuration" if own is not None else "the configuration of the run"
            print(f"{options.write} is {whose} with these lines.")
    return 0


def _text(fitted: Fit, found: Grid, changes: dict[str, Any], config: Config) -> list[str]:
    base = found.base.outcomes[0]
    lines = [table.checked(fitted, base), table.far_off(fitted, base), "", table.table(found), ""]
    lines += table.verdict(found, config)
    lines += [f"not played: {setting}: {why}" for setting, why in found.refused.items()]
    if changes:
        lines += ["", "lines for the configuration:", table.paste(changes)]
    return [line for n, line in enumerate(lines) if line or n != 1]
