"""`eval.final`: behind the end of the run, the set is played with the best export, by `asyncrl eval`."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Callable
from pathlib import Path

from asyncrl.config import Config
from asyncrl.config.held_out import every_set
from asyncrl.launch.processes import Process, Role, python, threads
from asyncrl.launch.supervision.supervision import Outcome
from asyncrl.run_folder import BEST, RunFolder

POLL_S = 0.2


def play(run: RunFolder, config: Config, interrupted: Callable[[], bool], poll: Callable[[float], object]) -> Outcome:
    """The outcome of a run that has finished but for this. `poll` is called again and again, with seconds to wait."""
    run.final.unlink(missing_ok=True)
    try:
        best = run.exports / json.loads((run.exports / BEST).read_text())["export"]
    except (OSError, ValueError, KeyError) as error:
        return _failed(
            f"no evaluation of {config.eval.keep_best} on the line of history has an export ({error}): asyncrl eval "
            f"--config {run.config} --checkpoint CHECKPOINT --set {config.eval.final} plays it with a checkpoint"
        )
    if not (best / "hf").is_dir():
        return _failed(f"the best export, {best}, is missing: a --resume from before its step writes it again")
    command = command_of(run, config, best)
    limit_s = deadline_s(config)
    process = Process(Role("final", command, environment=threads(config.actors.threads)), run.id, run.log("final"))
    deadline = time.monotonic() + limit_s
    while (code := process.ended()) is None:
        if interrupted() or time.monotonic() > deadline:
            process.kill("interrupted" if interrupted() else f"not over within {limit_s:g} s (actors.episode_s)")
        poll(POLL_S)
    by_hand = f"by hand: {shlex.join(('asyncrl', *command[3:]))}"
    if interrupted():
        return Outcome("interrupted", 130, f"interrupted while eval.final was played; {by_hand}")
    if code:
        return _failed(f"{process.killed_for or _said(process.log, code)}; {by_hand}")
    return Outcome("finished", 0)


def command_of(run: RunFolder, config: Config, best: Path) -> tuple[str, ...]:
    """That plays the set and writes the figures."""
    options = ("--config", str(run.config), "--checkpoint", str(best), "--set", config.eval.final)
    return python("asyncrl", "eval", *options, "--out", str(run.final))


def deadline_s(config: Config) -> float:
    """Within which even the longest episodes end, each repeated as often as it may be."""
    held_out = next(each for each in every_set(config) if each.name == config.eval.final)
    turns = math.ceil(held_out.tasks * held_out.per_task / config.actors.most_slots)
    return config.launch.start_s + turns * (config.env.retries + 1) * config.actors.most_episode_s


def _said(log: Path, code: int) -> str:
    """The command's last words."""
    lines = [line for line in log.read_text(errors="replace")[-10_000:].splitlines() if line.strip()]
    return f"exit code {code}: {lines[-1].removeprefix('asyncrl: ')}" if lines else f"exit code {code}"


def _failed(why: str) -> Outcome:
    return Outcome("failed", 1, f"the run is trained to its end; eval.final was not played: {why}")
