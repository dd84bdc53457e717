"""Sends records to Weights & Biases: online, or offline into the run folder (`wandb sync` sends them later).

Imported only when the sink is used: `pip install 'asyncrl[wandb]'`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import wandb

from asyncrl.errors import ConfigError
from asyncrl.redaction import masked
from asyncrl.tracking.rollouts.tables import COLUMNS, NewTables
from asyncrl.tracking.series import AXES, SECTIONS
from asyncrl.tracking.sinks import with_overview
from asyncrl.tracking.state import Event, Record

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.run_folder import RunFolder


class Wandb:
    def __init__(self, run: RunFolder, config: Config) -> None:
        """Raises ConfigError if `tracking.wandb_mode` is online and wandb has no API key: it would ask on the terminal,
        where nobody answers."""
        mode = config.tracking.wandb_mode
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ConfigError(
                "tracking.wandb_mode is online but wandb has no API key: run `wandb login`, or set it to offline and "
                "send the run later with `wandb sync`."
            )
        # The launcher has the console and measures the machine: wandb does neither. The command line may hold secrets.
        settings = wandb.Settings(
            console="off", silent=True, disable_git=True, x_disable_stats=True, x_disable_meta=True
        )
        self._run = wandb.init(
            project=config.tracking.project, name=run.name, id=_id(run), resume="allow", mode=mode,
            dir=str(run.path), config=masked(config.model_dump(mode="json")), settings=settings,
        )  # fmt: skip
        for axis in AXES:
            self._run.define_metric(axis)
        for section in ("0_overview", *SECTIONS):
            self._run.define_metric(f"{section}/*", step_metric="step")
        self._tables = NewTables(run.rollouts)

    def record(self, record: Record) -> None:
        self._run.log(with_overview(record))
        self._log_rollouts()

    def event(self, event: Event) -> None:
        """Do nothing: events stay in events.jsonl, since wandb cannot show them on a time axis."""

    def _log_rollouts(self) -> None:
        for step, rows in self._tables.look():
            self._run.log({"rollouts": wandb.Table(columns=list(COLUMNS), data=rows), "step": step})

    def close(self, summary: Mapping[str, Any]) -> None:
        self._log_rollouts()
        for name, value in summary.items():
            self._run.summary[name] = value
        self._run.finish()
        wandb.teardown()  # end its service now, before the launcher exits


def _id(run: RunFolder) -> str:
    """One id per run folder, the same after a resume."""
    return hashlib.sha256(str(run.path).encode()).hexdigest()[:12]
