"""Spans: what a process did when, for `asyncrl trace`. Written to `spans.jsonl` of the run folder, a line per report:

    {"role": "learner", "spans": [["step", 1764000000.25, 0.31, 7], ...]}

A span is a name, its end in seconds since the epoch by the clock of its process, its seconds, and the policy version or
batch that it was for (null: none). The file holds at least the last `LAST_STEPS` training steps, and at most twice as
many with the file that it replaces; under `tracking.trace_every: N` it holds one training step in N of the whole run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from asyncrl.tracking.sinks.jsonl import Lines

LAST_STEPS = 50
MAX_BYTES = 64 << 20
"""Most bytes of the file; what is reported beyond is counted and left out."""


class Span(NamedTuple):
    name: str
    end: float
    """Seconds since the epoch"""
    seconds: float
    mark: int | None = None
    """The policy version or batch that it was for"""

    @property
    def begin(self) -> float:
        return self.end - self.seconds


class SpanLog:
    """Appends spans to the file of a run, and replaces the file every `LAST_STEPS` steps."""

    def __init__(self, path: Path, every: int) -> None:
        """`every`: `tracking.trace_every`. Raises OSError."""
        self._path, self._every = path, every
        self._file = Lines(path)
        self._first: int | None = None
        """The first training step in the file, where it holds the last ones."""
        self.left_out = 0

    def append(self, role: str, spans: Sequence[Sequence[object]], step: int) -> None:
        """Writes what `role` reported while `step` training steps were done. Raises OSError."""
        if self._every and step % self._every:
            return
        if not self._every:
            self._replace(step)
        if self._path.stat().st_size >= MAX_BYTES:
            self.left_out += len(spans)
            return
        self._file.append(json.dumps({"role": role, "spans": spans}, separators=(",", ":")))

    def close(self) -> None:
        self._file.close()

    def _replace(self, step: int) -> None:
        self._first = step if self._first is None else self._first
        if 0 <= step - self._first < LAST_STEPS:
            return
        self._file.close()
        self._path.replace(former(self._path))
        self._file, self._first = Lines(self._path), step


def former(path: Path) -> Path:
    """The file that `path` replaced."""
    return path.with_name(f"former-{path.name}")


def read(path: Path) -> Iterator[tuple[str, Span]]:
    """Role and span of everything in the file and the one that it replaced, in the order of the reports. A last line
    that a killed launcher left unfinished is passed over. Raises ValueError for any other damage."""
    for file in (former(path), path):
        lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                break
            try:
                report = json.loads(line)
                spans = [Span(str(n), float(t), float(s), m) for n, t, s, m in report["spans"]]
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{file}, line {number}, holds no spans: {error}. Move the file away.") from error
            yield from ((str(report["role"]), span) for span in spans)
