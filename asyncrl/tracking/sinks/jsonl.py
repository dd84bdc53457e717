"""The sink that is always there: `metrics.jsonl` and `events.jsonl` in the run folder.

metrics.jsonl holds one object per training step, and one per evaluation; lines of the same step complete each other,
later ones win. A value that is not finite is null.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.tracking.state import Event, Record

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.run_folder import RunFolder

_DIGITS = 6
"""Significant digits kept: a file that a person can read, and plots need no more."""


class JsonLines:
    def __init__(self, run: RunFolder, _: Config | None = None) -> None:
        self._metrics = _Lines(run.metrics)
        self._events = _Lines(run.path / "events.jsonl")

    def record(self, record: Record) -> None:
        """Raises OSError, and leaves nothing of the line behind, when the disk does not take it."""
        self._metrics.append(json.dumps({name: _short(value) for name, value in record.items()}))

    def event(self, event: Event) -> None:
        """As `record`."""
        line = {"t": round(event.t, 3), "kind": event.kind, "role": event.role, **event.fields}
        self._events.append(json.dumps(line, default=str))

    def close(self, summary: Mapping[str, Any]) -> None:
        self._metrics.close()
        self._events.close()


class _Lines:
    """Appends whole lines, also behind a part of one that a killed launcher or a full disk left."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        whole = path.read_bytes().rfind(b"\n") + 1
        self._file.truncate(whole)

    def append(self, line: str) -> None:
        data, before = (line + "\n").encode(), os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        except OSError:
            self._file.truncate(before)
            raise

    def close(self) -> None:
        self._file.close()


def read(metrics: Path) -> Iterator[Record]:
    """The records of a metrics.jsonl, null as NaN. A last line that a killed launcher left half written is left out.

    Raises ValueError, naming file and line, for any other line that is no JSON object.
    """
    if not metrics.exists():
        return
    lines = metrics.read_text().split("\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                return
            raise ValueError(f"{metrics}, line {number}: not JSON ({error}). Remove the line to go on.") from None
        try:
            record = {name: math.nan if value is None else float(value) for name, value in values.items()}
        except (AttributeError, TypeError, ValueError):
            raise ValueError(f"{metrics}, line {number}: not numbers by name. Remove the line to go on.") from None
        yield record


def by_step(metrics: Path) -> list[Record]:
    """The records in the order of their steps, lines of the same step put together."""
    steps: dict[float, Record] = {}
    for record in read(metrics):
        steps.setdefault(record["step"], {}).update(record)
    return [steps[step] for step in sorted(steps)]


def _short(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.{_DIGITS}g}")
