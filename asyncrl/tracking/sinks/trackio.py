"""Sends records to trackio: a local database and dashboard that need no account.

The database is in `<launch.runs_dir>/.trackio`, next to the run folders, so that one dashboard compares runs.
Imported only when the sink is used: `pip install 'asyncrl[trackio]'`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.redaction import masked
from asyncrl.tracking.rollouts.tables import COLUMNS, NewTables
from asyncrl.tracking.sinks import with_overview
from asyncrl.tracking.state import Event, Record

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.run_folder import RunFolder


log = logging.getLogger(__name__)


def _log(*words: object, **_: object) -> None:
    log.debug("%s", " ".join(map(str, words)))


def folder(run: RunFolder) -> Path:
    """The folder of trackio's database of this run and its neighbours."""
    return run.path.parent / ".trackio"


def load(run: RunFolder) -> Any:
    """The package, set to the database of this run. Raises ModuleNotFoundError if it is not installed."""
    os.environ["TRACKIO_DIR"] = str(folder(run))  # read once, when it is imported
    import trackio

    # It prints an announcement; the terminal belongs to the launcher.
    for module in (trackio, trackio.run, trackio.utils):
        module.print = _log
    return trackio


class Trackio:
    def __init__(self, run: RunFolder, config: Config) -> None:
        self._tables = NewTables(run.rollouts)
        values = masked(config.model_dump(mode="json"))
        self._trackio = load(run)
        self._run = self._trackio.init(
            project=config.tracking.project, name=run.name, config=values, resume="allow", embed=False,
            auto_log_cpu=False, auto_log_gpu=False,
        )  # fmt: skip

    def record(self, record: Record) -> None:
        values = with_overview(record)
        self._run.log(values, step=int(values.pop("step")))
        self._log_rollouts()

    def event(self, event: Event) -> None:
        """Events stay in events.jsonl."""

    def _log_rollouts(self) -> None:
        for step, rows in self._tables.look():
            self._run.log({"rollouts": self._trackio.Table(columns=list(COLUMNS), data=rows)}, step=step)

    def close(self, summary: Mapping[str, Any]) -> None:
        self._log_rollouts()
        self._run.finish()
