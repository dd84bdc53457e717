"""One run from its configuration to its summary."""

from __future__ import annotations

import json
import shutil
import time
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import zmq
from rich.console import Console

from asyncrl.buffer.rules import Rules
from asyncrl.config import Config
from asyncrl.config.loading import fields
from asyncrl.config.rules import warnings
from asyncrl.errors import AsyncRLError, ConfigError, RunError
from asyncrl.launch.backends.local import backend
from asyncrl.launch.loop import Launcher
from asyncrl.launch.preflight import check_cpus, check_disk, check_model, check_names, refuse_live
from asyncrl.launch.processes import this_process
from asyncrl.launch.roles import roles
from asyncrl.launch.supervision import Outcome
from asyncrl.process import leftovers
from asyncrl.run_folder import RunFolder, replace

if TYPE_CHECKING:
    from asyncrl.tracking.collector import Collector


def new_run(config: Config, stem: str) -> RunFolder:
    """A folder named `launch.name`, or after the config and the time. Raises RunError when it is taken."""
    folder = Path(config.launch.runs_dir)
    check_disk(folder)
    if config.launch.name is not None:
        path = folder / config.launch.name
        if (path / "run.json").exists():
            refuse_live(RunFolder.existing(path))
        return RunFolder.create(path, config)
    name = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    taken = sum(1 for _ in folder.glob(f"{name}*"))
    return RunFolder.create(folder / (f"{name}-{taken + 1}" if taken else name), config)


FIXED = ("model", "data", "env", "learner.group_size", "learner.groups_per_step", "buffer.dir")
"""Fields and sections that a run cannot change: the groups in its ledger were drawn, played and batched with them."""
FREE = frozenset(
    f"env.{name}"
    for name in ("call_s", "workers", "worker_count", "retries", "max_failures", "failure_window", "on_failures")
)
"""Of those, the fields that do not say what is played, but where, for how long and how often."""
PLACE = ("launch.name", "launch.runs_dir")
"""Where a run lies."""


def check_resume(run: RunFolder, config: Config) -> None:
    """Raises ConfigError when `config` differs from the run's in what cannot change."""
    before = run.load_config()
    for field in PLACE:
        if (was := attrgetter(field)(before)) != (now := attrgetter(field)(config)):
            raise ConfigError(
                f"{field} cannot change with --resume: it was {was!r}, now {now!r}, and the run stays in {run.path}. "
                "Leave it out, or begin a new run from this one's checkpoint with --fork."
            )
    _check_fixed(before, config, "--resume")


def _check_fixed(before: Config, config: Config, how: str) -> None:
    for field, _ in fields(Config):
        if field in FREE or not any(f"{field}.".startswith(f"{fixed}.") for fixed in FIXED):
            continue
        if (was := attrgetter(field)(before)) != (now := attrgetter(field)(config)):
            raise ConfigError(
                f"{field} cannot change with {how}: it was {was!r}, now {now!r}, and what the ledger holds was drawn "
                "and played with the former. Leave it out, or start a new run from the weights: --config FILE "
                "--model.path RUN/checkpoints/STEP/hf."
            )


def checkpoint_at(run: RunFolder, step: int | None) -> Path:
    """The checkpoint after training step `step`; None: the newest. Raises ConfigError when there is none."""
    from asyncrl.learner.checkpoints import complete, read_list

    found = {}
    for path in complete(run.checkpoints):
        found[read_list(path)[0].version] = path
    if not found:
        raise ConfigError(f"{run.path} has no checkpoint: nothing to begin from. Start a new run.")
    if step is None:
        return complete(run.checkpoints)[-1]
    if step not in found:
        known = ", ".join(map(str, sorted(found)))
        raise ConfigError(f"--at-step is {step}, and there is no such checkpoint: expected one of {known}.")
    return found[step]


def fork_run(source: RunFolder, config: Config, step: int | None) -> RunFolder:
    """A new run that begins with a copy of `source`'s checkpoint at `step`, its ledger in it. Raises ConfigError."""
    checkpoint = checkpoint_at(source, step)
    before = source.load_config()
    if config.buffer.dir is not None and config.buffer.dir == before.buffer.dir:
        raise ConfigError(
            f"buffer.dir is {config.buffer.dir!r}, which holds the ledger of {source.path}: give another."
        )
    # Named alike, it would be the same folder; that it is another one is all that was to be checked.
    moved = config.buffer.model_copy(update={"dir": before.buffer.dir})
    _check_fixed(before, config.model_copy(update={"buffer": moved}), "--fork")
    run = new_run(config, source.name)
    shutil.copytree(checkpoint, run.checkpoints / checkpoint.name)
    shutil.copytree(source.acks, run.acks, dirs_exist_ok=True)  # who was told what, of what the ledger in it remembers
    return run


def play(
    run: RunFolder,
    config: Config,
    console: Console,
    *,
    resume: bool = False,
    again: bool = False,
    fresh: Path | None = None,
) -> Outcome:
    """Runs it to its end and leaves summary.json and the report.

    Args:
        resume: it begins with a checkpoint.
        again: it was launched before, and its folder is made ready anew.
        fresh: the checkpoint at which a new branch begins.

    Raises RunError when it cannot start, naming them when processes of an earlier launch still live.
    """
    from asyncrl.tracking.collector import Collector

    leftovers.remove()
    with run.hold():
        if again:  # held first: a launcher on another host that shares the folder is told by nothing else
            check_disk(run.path)
            refuse_live(run)
            run.save_config(config)
            run.open()
        run.note(processes={"launcher": this_process()})
        for warning in warnings(config):
            console.print(f"warning: {warning}", style="yellow", highlight=False)
        console.print(f"run folder {run.path}", highlight=False, soft_wrap=True)
        try:
            collector = Collector(run, config, console)
        except zmq.ZMQError as error:
            raise RunError(
                f"{run.address('launcher')} cannot be bound: {error}. Set TMPDIR to another folder, or launch.host "
                "to an address of this machine."
            ) from error
        except ValueError as error:
            raise RunError(str(error)) from error
        outcome = Outcome("failed", 1, "the launcher failed")
        try:
            started = roles(run, config, resume=resume, fresh=fresh)
            outcome = Launcher(run, config, started, collector, backend(run, config)).supervise()
        except AsyncRLError as error:
            outcome = Outcome("failed", error.exit_code, str(error))
        finally:
            _conclude(run, outcome, collector)
        return outcome


def check(config: Config) -> None:
    """Everything that can be known before a process is started. Raises ConfigError."""
    check_model(config)
    check_names(config)
    Rules.of(config)
    check_cpus(config)


def _conclude(run: RunFolder, outcome: Outcome, collector: Collector) -> None:
    """summary.json first: whatever fails after it, the figures are there."""
    collector.poll(0.0)  # what the processes said last
    ended = {"run": run.name, "outcome": outcome.kind, "why": outcome.why, "exit_code": outcome.exit_code}
    summary = ended | collector.summary()
    replace(run.summary, json.dumps(summary, indent=2) + "\n")
    collector.close(summary)
