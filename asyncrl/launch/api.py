"""Prepares a run, which checks everything that can be known beforehand, and launches it. The command line and
`asyncrl.train` both do it by these two functions.

    Config, Origin ──prepare──> Prepared ──launch──> run folder ──> Launcher (loop.py) ──> Outcome, summary.json, report
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import zmq

from asyncrl.actors.envs import ENVIRONMENTS
from asyncrl.actors.envs.agent import is_agent
from asyncrl.config import Config
from asyncrl.config.demonstrations import supervised
from asyncrl.config.held_out import every_set, for_set
from asyncrl.config.rules import warnings
from asyncrl.errors import AsyncRLError, RunError
from asyncrl.launch import final
from asyncrl.launch.backends.local import Local, backend
from asyncrl.launch.backends.preloaded import Preloaded, preloading
from asyncrl.launch.checks.first_demonstrations import check_demonstrations
from asyncrl.launch.checks.first_reset import check_reset
from asyncrl.launch.checks.first_tasks import check_first_tasks
from asyncrl.launch.checks.installed import check_engine, check_hub, check_teacher
from asyncrl.launch.loop import Launcher
from asyncrl.launch.origins import Origin
from asyncrl.launch.placement.report import before_start
from asyncrl.launch.preflight import check, check_disk, refuse_live
from asyncrl.launch.processes import this_process
from asyncrl.launch.roles import roles
from asyncrl.launch.supervision.interrupts import Interrupts
from asyncrl.launch.supervision.supervision import Outcome
from asyncrl.plugins import resolve
from asyncrl.process import leftovers
from asyncrl.redaction import redact
from asyncrl.run_folder import RunFolder, replace
from asyncrl.tracking import sinks

if TYPE_CHECKING:
    from rich.console import Console

    from asyncrl.data.base import TaskSource
    from asyncrl.tracking.collector import Collector

NEW = Origin()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that has passed its checks; nothing is written or started yet."""

    config: Config
    origin: Origin
    checkpoint: Path | None
    """The checkpoint of a fork, or of a new branch."""
    stem: str
    """Beginning of the run's name where `launch.name` gives none."""
    warnings: tuple[str, ...]
    placement: tuple[str, ...] = ()
    """The table of the GPUs of each process; empty: all compute on the CPU."""


def prepare(
    config: Config,
    origin: Origin = NEW,
    *,
    stem: str = "run",
    checks: Literal["names", "all", "data"] = "data",
) -> Prepared:
    """Checks a run before anything of it is written. Raises ConfigError and RunError.

    `checks`: "names" checks what needs neither data nor torch; "data", as for a launch, also opens the data, looks at
    the first tasks and tries one reset, so that the user sees their errors before anything starts; "all" also checks
    the learner's choices, which imports torch.
    """
    checkpoint = origin.check(config)
    check(config)
    sinks.check(config.tracking.sinks)
    warned = [*origin.warnings(config), *warnings(config)]
    if checks != "names":
        check_engine(config)
        check_hub(config)
        check_teacher(config)
        warned = [*warned, *_check_data(config)]
    if checks == "all":
        from asyncrl.learner.build import builder_of, objective_of

        builder_of(config), objective_of(config)
    gpus = () if checks != "data" else before_start(config)
    return Prepared(config, origin, checkpoint, stem, tuple(warned), tuple(gpus))


def check_and_launch(
    config: Config,
    origin: Origin = NEW,
    *,
    stem: str = "run",
    opened: Callable[[RunFolder], None] = lambda _: None,
    started: Preloaded | None = None,
) -> Outcome:
    """`prepare` and `launch`. While the checks are made, another process, which may be `started` already, imports what
    learner and actors need."""
    with preloading(config, started) as preloaded:
        return launch(prepare(config, origin, stem=stem), opened=opened, preloaded=preloaded)


def launch(
    prepared: Prepared,
    console: Console | None = None,
    opened: Callable[[RunFolder], None] = lambda _: None,
    preloaded: Preloaded | None = None,
) -> Outcome:
    """Runs it to its end and writes summary.json and the report.

    `console` shows the run, None: on this process's terminal. `opened` is called when the run folder is this run's.
    `preloaded` forks roles. Raises RunError when the run cannot start, naming the processes of an earlier launch that
    still live.
    """
    config, origin = prepared.config, prepared.origin
    run = origin.open(config, prepared.stem, prepared.checkpoint)
    leftovers.remove()
    interrupts = Interrupts()
    with run.locked(), interrupts.counted():
        if origin.resume is not None:  # after `hold`: nothing else shows a launcher on another host
            check_disk(run.path)
            refuse_live(run)
            if prepared.checkpoint is not None:  # before the config: what follows is done by whichever launch comes
                replace(run.fresh, prepared.checkpoint.name)
            run.save_config(config)
            run.open()
        run.note(processes={"launcher": this_process()}, **({"id": preloaded.run_id} if preloaded else {}))
        opened(run)
        collector = _collector(run, prepared, console)
        outcome = Outcome("failed", 1, "the launcher failed")
        try:
            processes = roles(run, config, resume=origin.earlier is not None)
            fork = preloaded and partial(preloaded.fork, interrupted=lambda: interrupts.count > 0)
            started_by = Local(run, config, fork) if fork else backend(run, config)
            outcome = Launcher(run, config, processes, collector, interrupts, started_by).supervise()
            if config.eval.final and outcome.kind == "finished":
                outcome = final.play(run, config, lambda: interrupts.count > 0, collector.poll)
        except AsyncRLError as error:
            outcome = Outcome("failed", error.exit_code, str(error))
        finally:
            _conclude(run, outcome, collector, interrupts)
        return outcome


def _check_data(config: Config) -> list[str]:
    """Opens the task source and what is configured on top of it, and tries the first tasks; gives warnings."""
    from asyncrl.buffer.tasks.sources import open_curriculum, open_source
    from asyncrl.data.added_tasks import open_on_step_end
    from asyncrl.rewards.group_score import open_group_score

    source = open_source(config)
    open_curriculum(config, source)
    open_on_step_end(config)
    open_group_score(config)
    check_demonstrations(config)
    if supervised(config) and not every_set(config):
        return []  # no task is played
    tasks, warned = check_first_tasks(config, source)
    if config.launch.try_reset and not is_agent(resolve(config.env.name, ENVIRONMENTS, "env.name")):
        check_reset(config, tasks)
    return warned + _check_held_out(config, source)


def _check_held_out(config: Config, source: TaskSource) -> list[str]:
    """Opens what the held-out sets have of their own, and tries it; gives warnings. Raises ConfigError."""
    from asyncrl.buffer.tasks.drawing import checked_task
    from asyncrl.buffer.tasks.sources import open_held_out

    own, empty = open_held_out(config), []
    for each in every_set(config):
        given, tasks = config.eval.sets.get(each.name), own.get(each.name, source)
        if not tasks.held_out_size:
            empty.append(each.name)
        elif given is not None and given.env and config.launch.try_reset and not _is_agent(given.env, each.name):
            check_reset(for_set(config, each.name), [checked_task(tasks.held_out(0), "held-out task 0")])
    if not empty:
        return []
    return [
        f"eval.tasks is {config.eval.tasks}, and data.source {config.data.source} holds no task out: nothing is "
        f"evaluated ({', '.join(empty)}). data.options.held_out_size holds some out, eval.tasks 0 says that none is "
        "meant.",
    ]


def _is_agent(env: str, of_set: str) -> bool:
    return is_agent(resolve(env, ENVIRONMENTS, f"eval.sets.{of_set}.env"))


def _collector(run: RunFolder, prepared: Prepared, console: Console | None) -> Collector:
    """Shows where the run is; takes the reports from now on."""
    from asyncrl.tracking.collector import Collector
    from asyncrl.tracking.terminal.live import Screen

    console = console or Screen()
    for warning in prepared.warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True)
    for line in prepared.placement:
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"run folder {run.path}", highlight=False, soft_wrap=True)
    try:
        return Collector(run, prepared.config, console)
    except zmq.ZMQError as error:
        raise RunError(
            f"{run.address('launcher')} cannot be bound: {error}. Set TMPDIR to another folder, or launch.host to an "
            "address of this machine."
        ) from error
    except ValueError as error:
        raise RunError(str(error)) from error


def _conclude(run: RunFolder, outcome: Outcome, collector: Collector, interrupts: Interrupts) -> None:
    """Writes summary.json before anything that may fail. A further interrupt leaves out the plots not drawn yet."""
    collector.poll(0.0)  # the last reports
    why = redact(outcome.why or collector.why_ended)
    ended = {"run": run.name, "outcome": outcome.kind, "why": why, "exit_code": outcome.exit_code}
    summary = ended | collector.summary()
    replace(run.summary, json.dumps(summary, indent=2) + "\n")
    before = interrupts.count
    collector.close(summary, lambda: interrupts.count > before)
