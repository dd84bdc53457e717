"""The sink of every run: `metrics.jsonl` and `events.jsonl` in the run folder.

metrics.jsonl holds one object per training step and one per evaluation; lines of the same step are merged, and later
ones win. A value that is not finite is null.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.tracking.state import Event, Record

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.run_folder import RunFolder

_TAIL_BYTES = 1 << 18
_DIGITS = 6
"""Significant digits kept; plots need no more."""


class JsonLines:
    def __init__(self, run: RunFolder, _: Config | None = None) -> None:
        self._metrics = Lines(run.metrics)
        self._events = Lines(run.path / "events.jsonl")

    def record(self, record: Record) -> None:
        """Append the record. Raises OSError if the disk refuses it; no part of the line is left then."""
        self._metrics.append(json.dumps({name: _short(value) for name, value in record.items()}))

    def event(self, event: Event) -> None:
        """Append the event; see `record`."""
        line = {"t": round(event.t, 3), "kind": event.kind, "role": event.role, **event.fields}
        self._events.append(json.dumps(line, default=str))

    def close(self, summary: Mapping[str, Any]) -> None:
        self._metrics.close()
        self._events.close()


class Lines:
    """Appends whole lines; an unfinished line, left by a killed launcher or a full disk, is removed first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._file.truncate(path.read_bytes().rfind(b"\n") + 1)

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
    """Yields the records of a metrics.jsonl, null as NaN, without an unfinished last line.

    Raises ValueError, naming file and line, for any other line that is not a JSON object.
    """
    if not metrics.exists():
        return
    *lines, last = metrics.read_text().split("\n")
    for number, line in enumerate(lines, 1):
        if line:
            yield _record(line, f"{metrics}, line {number}")
    with suppress(json.JSONDecodeError):
        json.loads(last)
        yield _record(last, f"{metrics}, line {len(lines) + 1}")


def _record(line: str, where: str) -> Record:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error}). Remove the line to continue.") from None
    try:
        return {name: math.nan if value is None else float(value) for name, value in values.items()}
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"{where}: not numbers by name. Remove the line to continue.") from None


def by_step(metrics: Path) -> list[Record]:
    """The records in the order of their steps, lines of the same step merged."""
    steps: dict[float, Record] = {}
    for record in read(metrics):
        steps.setdefault(record["step"], {}).update(record)
    return [steps[step] for step in sorted(steps)]


def newest(metrics: Path) -> Record:
    """The latest value of each series in the last 256 KiB of a metrics.jsonl; empty if there is none.

    Raises ValueError, see `read`.
    """
    if not metrics.exists():
        return {}
    with metrics.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
        file.seek(start)
        _, *lines = file.read().split(b"\n") if start else (b"", *file.read().split(b"\n"))
    merged: Record = {}
    for line in lines[:-1]:  # what follows the last line's end is not finished
        if line:
            merged |= _record(line.decode(), f"{metrics}, near its end")
    return merged


def _short(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.{_DIGITS}g}")
