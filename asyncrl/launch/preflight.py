"""Checks of the configuration and the machine: before any process is started, and after one has died."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.buffer.rules import Rules
from asyncrl.config import Config
from asyncrl.errors import ConfigError, RunError
from asyncrl.launch.checks.form import check_form
from asyncrl.launch.processes import alive, of_run, role_of
from asyncrl.launch.supervision.supervision import Outcome
from asyncrl.model import local_path, resolve_path
from asyncrl.plugins import check_options, resolve
from asyncrl.run_folder import RunFolder
from asyncrl.user_errors import user_error
from asyncrl.weights.channels import channel

MIN_FREE_MB = 200
"""Free disk space without which a run is not started."""
FULL_BYTES = 1 << 20
"""Free disk space below which a disk counts as full."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A config field that picks something by name, and the table of the names that come with asyncrl."""

    field: str
    module: str
    table: str
    provided: tuple[str, ...] | str
    """Parameters that asyncrl passes itself, or the name of a function in `module` that gives them; the others come
    from the section's field `options`."""


CHOICES = (
    Choice("data.source", "asyncrl.data", "SOURCES", ("seed", "model")),
    Choice("env.name", "asyncrl.actors.envs", "ENVIRONMENTS", "provided_by_actor"),
)
"""Choices that are checked without importing torch. The role that uses another choice checks it before it does anything
else and exits with CONFIG_ERROR, and the launcher shows its sentence; `--dry-run` checks the learner's."""


def check(config: Config) -> None:
    """Everything that needs neither the data nor torch. Raises ConfigError."""
    check_model(config)
    check_names(config)
    Rules.of(config)
    check_cpus(config)


def check_names(config: Config) -> None:
    """Resolves every name and checks its options. Raises ConfigError."""
    channel(config)
    for choice in CHOICES:
        section, _, name = choice.field.partition(".")
        values = getattr(config, section)
        options: Mapping[str, Any] = values.options
        module = importlib.import_module(choice.module)
        try:
            chosen = resolve(getattr(values, name), getattr(module, choice.table), choice.field)
            if choice.field == "env.name":
                check_form(chosen, values.name, options)
            provided = choice.provided
            if isinstance(provided, str):
                provided = getattr(module, provided)(chosen)
            check_options(chosen, options, f"{section}.options", provided)
            # Checks beyond the signature, e.g. of the name of a score.
            if callable(check := getattr(chosen, "check", None)):
                check(options)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        except Exception as error:  # the user's module raised while it was imported
            raise ConfigError(
                f"{choice.field} is {getattr(values, name)!r}, which fails when it is imported: "
                f"{user_error(error).text}. Import it in a separate Python to see more."
            ) from error


def check_model(config: Config) -> None:
    """Checks that a local folder holds a model with at least `env.max_tokens` positions; the roles check hub names.
    Raises ConfigError."""
    named = config.model.path
    path = resolve_path(config.model) if named == "quickstart" else local_path(config.model)
    if path is None:
        return
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise ConfigError(
            f"model.path is {named!r}, a folder of LoRA adapters: merge them into their base model "
            "(peft's merge_and_unload, then save_pretrained), and name the folder of the result."
        )
    if not (path / "config.json").is_file():
        raise ConfigError(f"model.path is {named!r}, a folder without config.json: save the model there.")
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ConfigError(
            f"model.path is {named!r}, a folder without a tokenizer (tokenizer.json): save it beside the model with "
            "tokenizer.save_pretrained."
        )
    try:
        positions = json.loads((path / "config.json").read_text()).get("max_position_embeddings")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"model.path is {named!r}, whose config.json is not a JSON object: {error}.") from error
    if isinstance(positions, int) and config.env.max_tokens > positions:
        raise ConfigError(
            f"env.max_tokens is {config.env.max_tokens} but the model has {positions} positions: lower it."
        )


def check_cpus(config: Config) -> None:
    """Raises ConfigError when `launch.cpus` names an unknown role or a core that this process may not use."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    for role, cpus in config.launch.cpus.items():
        if role.partition("-")[0] not in ("actor", "learner", "buffer", "weights", "scorer"):
            raise ConfigError(
                f"launch.cpus names {role!r}: expected actor, learner, buffer, weights, scorer, or one such as actor-0."
            )
        if missing := set(cpus) - cores:
            raise ConfigError(
                f"launch.cpus.{role} is {list(cpus)}, but core {min(missing)} is not among those that this process may "
                f"use ({', '.join(map(str, sorted(cores)))}): choose from these."
            )


def check_disk(runs_dir: Path) -> None:
    """Raises RunError when the disk of the run folders is full or cannot be written."""
    folder = runs_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    field = f"launch.runs_dir is {str(runs_dir)!r}"
    if not folder.is_dir():
        raise RunError(f"{field}, and {folder} is a file: choose another folder, or move the file.")
    if not os.access(folder, os.W_OK):
        raise RunError(
            f"{field}, and user {os.geteuid()} cannot write {folder} (it is of user {folder.stat().st_uid}, mode "
            f"{folder.stat().st_mode & 0o777:o}, or its disk is read-only): choose another folder."
        )
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"{field}, which cannot be made in {folder} ({error.strerror}): choose another folder."
        ) from error
    free_mb = shutil.disk_usage(folder).free >> 20
    if free_mb < MIN_FREE_MB:
        raise RunError(
            f"launch.runs_dir is {str(runs_dir)!r}, on a disk with {free_mb} MB free: a run needs at least "
            f"{MIN_FREE_MB} MB; free some, or choose another folder."
        )


def full_disk(*folders: Path) -> Outcome | None:
    """How a run ends whose disk is full: a process that cannot write dies without a message, and would again."""
    for folder in folders:
        # A ledger on another host has no folder here.
        if folder.is_dir() and shutil.disk_usage(folder).free <= FULL_BYTES:
            why = f"the disk of {folder} is full: free some space; asyncrl launch --resume continues from there"
            return Outcome("failed", 1, why)
    return None


def living(run: RunFolder) -> dict[int, str]:
    """The role of each live process of this run, by pid; for a grandchild followed by its command. A copy of a live
    run's folder has none."""
    return {} if run.copied_from else _recorded(run)


def _recorded(run: RunFolder) -> dict[int, str]:
    """The live processes that `run.json` names."""
    record = run.record()
    recorded = {pid: name for name, (pid, created) in record["processes"].items() if alive(pid, created)}
    return {process.pid: role_of(process) for process in of_run(record["id"])} | recorded


def refuse_live(run: RunFolder) -> None:
    """Raises RunError naming the processes of an earlier launch that still live; and for a folder that was copied from
    a run which is still live: files that were copied one by one, while they changed, are of no single moment."""
    if left := _recorded(run):
        named = ", ".join(f"{name} (pid {pid})" for pid, name in sorted(left.items()))
        if (original := run.copied_from) is not None:
            raise RunError(
                f"{run.path} is a copy of {original}, made while that run was live ({named}), so that its ledger and "
                "its payloads may not belong together. The original needs no stop: begin a run of your own from its "
                f"newest checkpoint with --fork {original}, or copy it again when it has ended."
            )
        raise RunError(f"{run.path} is in use by a live run: {named}. Stop it first: Ctrl-C, or kill these processes.")
