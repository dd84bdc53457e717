"""What a run's record says about times: its ledger, turn records, spans and metrics, as plain values for fit.py.

Reads only. Of trajectories whose payload was reclaimed the ledger still has length and duration, but not the turns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from asyncrl.audit.ledger import LedgerRows
from asyncrl.audit.payloads import PayloadDiffers, PayloadFiles, decoded
from asyncrl.audit.reading import read_ledger
from asyncrl.config import Config
from asyncrl.errors import ConfigError, RunError
from asyncrl.run_folder import RunFolder
from asyncrl.tracking import spans
from asyncrl.tracking.sinks import jsonl
from asyncrl.trajectory import TurnRecord

Place = tuple[int, int]
"""Group and index of a trajectory."""

FEWEST_STEPS = 8
"""Training steps below which a record says too little."""
FEWEST_EPISODES = 32
"""Stored trajectories with turn records below which the same holds."""


@dataclass(frozen=True, slots=True)
class Record:
    """The record of one run. Times are seconds since the epoch, durations seconds."""

    config: Config
    ledger: LedgerRows
    turns: Mapping[Place, Sequence[TurnRecord]]
    """Turn records of the trajectories whose payload is kept."""
    spans: Mapping[tuple[str, str], Sequence[spans.Span]]
    """By role and name, by end."""
    metrics: Sequence[Mapping[str, float]]
    """One record per training step."""

    def mean(self, series: str) -> float | None:
        """Mean of a series over the training steps that have it, the first ones left out; None without any."""
        values = [record[series] for record in self.metrics[FEWEST_STEPS // 2 :] if series in record]
        return sum(values) / len(values) if values else None


def read(run: RunFolder) -> Record:
    """Raises RunError, one sentence, if the folder holds no record from which times can be fitted."""
    try:
        config = Config.load(run.config)
    except ConfigError as error:
        raise RunError(f"{run.config} cannot be read, so this run cannot be planned from: {error}") from error
    ledger = read_ledger(run.ledger(config))
    finished = [batch for batch in ledger.line if batch.finished_at is not None]
    if len(finished) < FEWEST_STEPS:
        raise RunError(
            f"{run.path} has finished {len(finished)} training steps, and plan needs at least {FEWEST_STEPS}: let it "
            "run on, or give a longer --probe."
        )
    turns = _turns(run.ledger(config), ledger)
    if len(turns) < FEWEST_EPISODES:
        raise RunError(_why_no_turns(run, config, ledger, len(turns)))
    return Record(config, ledger, turns, _spans(run), _metrics(run))


def _turns(buffer: Path, ledger: LedgerRows) -> dict[Place, Sequence[TurnRecord]]:
    found: dict[Place, Sequence[TurnRecord]] = {}
    with closing(PayloadFiles(buffer / "payloads")) as files:
        for place, row in ledger.trajectories.items():
            group = ledger.groups[place[0]]
            if group.payload:
                try:
                    records = decoded(group, row, files.read).turn_records
                except (PayloadDiffers, FileNotFoundError):  # reclaimed since the ledger was read
                    continue
                if records:
                    found[place] = records
    return found


def _why_no_turns(run: RunFolder, config: Config, ledger: LedgerRows, known: int) -> str:
    kept = sum(ledger.groups[number].payload for number, _ in ledger.trajectories)
    if kept >= FEWEST_EPISODES > known:
        return (
            f"{kept} trajectories of {run.path} are kept and {known} of them carry the times of their turns: "
            f"actors.engine {config.actors.engine!r} or env.name {config.env.name!r} does not record them, so there is "
            "nothing to plan from."
        )
    return (
        f"{run.path} keeps {kept} trajectories, and plan needs the turns of at least {FEWEST_EPISODES}: let it run on, "
        "or run it with buffer.keep all."
    )


def _spans(run: RunFolder) -> dict[tuple[str, str], list[spans.Span]]:
    found: defaultdict[tuple[str, str], list[spans.Span]] = defaultdict(list)
    try:
        for role, span in spans.read(run.spans):
            found[role, span.name].append(span)
    except (OSError, ValueError) as error:
        raise RunError(f"the spans of this run cannot be read: {error}") from error
    for each in found.values():
        each.sort(key=lambda span: span.end)
    return dict(found)


def _metrics(run: RunFolder) -> list[Mapping[str, float]]:
    if not run.metrics.is_file():
        return []
    try:
        return [record for record in jsonl.by_step(run.metrics) if "throughput/step_s" in record]
    except (OSError, ValueError) as error:
        raise RunError(f"{run.metrics} cannot be read: {error}. Move it away to plan without it.") from error
