"""The samples as tables of the trackers: a row per trajectory, a table per training step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.errors import RunError
from asyncrl.redaction import redact
from asyncrl.tracking.rollouts.store import Key, files, read

COLUMNS = ("step", "batch", "group", "index", "task", "env", "reward", "rewards", "turns", "tokens", "stop", "text")
TEXT_CHARS = 8_000
"""Most characters of one text in a tracker's table; `asyncrl view RUN` shows the whole."""


class NewTables:
    """Gives what the learner has written since the last look: `(step, rows)`, `rows` in the order of `COLUMNS`."""

    def __init__(self, folder: Path) -> None:
        """What lies there already was given by an earlier launch of the run."""
        self._folder = folder
        self._seen: set[Key] = set(files(folder))

    def look(self) -> Iterator[tuple[int, list[list[Any]]]]:
        for key, path in files(self._folder).items():
            if key in self._seen:
                continue
            self._seen.add(key)
            try:
                rollouts = read(path)
            except RunError:  # `asyncrl view` names the file
                continue
            rows = [
                [
                    r.step, r.batch, r.group, r.index, r.task_id, r.env, r.reward,
                    ", ".join(f"{name} {value:g}" for name, value in r.rewards.items()), r.turns,
                    sum(sum(row.sampled) for row in r.rows), r.stop_reason, _short(r.text),
                ]
                for r in rollouts
            ]  # fmt: skip
            if rows:
                yield rollouts[0].step, rows


def _short(text: str) -> str:
    text = redact(text)
    left = len(text) - TEXT_CHARS
    return text if left <= 0 else f"{text[:TEXT_CHARS]} [{left} more characters]"
