"""The rows of a table on the disk, one JSON file per table: written as they come, so that an interrupted command goes
on where it ended. A row counts only as long as its config, its lag, its start model and its teacher are those of
today."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from results import processor

from asyncrl.config import Config
from asyncrl.model import resolve_path, teacher_folder
from learning.declared import ROOT

Row = dict[str, Any]
PACKAGES = ("torch", "transformers", "numpy")


def key(config: Config, lag: int) -> str:
    """What a run follows from, as a digest: its config, its lag, the weights that it starts from, and its teacher's.

    Fields at their defaults are left out, so that a later version's new field leaves the rows valid.
    """
    settings = config.model_dump_json(exclude={"model"}, exclude_defaults=True).replace(f"{ROOT}/", "")
    digest = hashlib.blake2b(settings.encode(), digest_size=8)
    digest.update(f"/{lag}/".encode())
    digest.update((resolve_path(config.model) / "model.safetensors").read_bytes())
    if config.learner.teacher.path:
        digest.update((teacher_folder(config.learner.teacher.path) / "model.safetensors").read_bytes())
    return digest.hexdigest()


class Rows:
    """Those of one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[tuple[str, str, int], Row] = {}
        if path.exists():
            for row in json.loads(path.read_text())["rows"]:
                self._found[_place(row)] = row

    def get(self, task: str, arm: str, seed: int) -> Row | None:
        return self._found.get((task, arm, seed))

    def add(self, row: Row) -> None:
        """Replaces an earlier row of the same task, arm and seed; the file is whole at every moment."""
        self._found[_place(row)] = row
        self._path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self._path.with_suffix(f".{os.getpid()}")
        rows = [json.dumps(self._found[place], separators=(",", ":")) for place in sorted(self._found)]
        scratch.write_text('{"rows":[\n' + ",\n".join(rows) + "\n]}\n")
        scratch.replace(self._path)


def machine() -> Mapping[str, Any]:
    """Of this machine, now."""
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "load": round(os.getloadavg()[0], 1),
    }


def _place(row: Row) -> tuple[str, str, int]:
    return row["task"], row["arm"], row["seed"]
