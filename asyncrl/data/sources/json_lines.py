"""Tasks from a JSON lines file, one task per line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncrl.data.order import ListedTasks, training_size
from asyncrl.errors import ConfigError


class JsonLinesSource(ListedTasks):
    """Yields the training tasks in a new random order in each epoch. Held-out prompts among them are an error."""

    def __init__(self, path: str, seed: int = 0, held_out_size: int = 0, held_out_path: str | None = None) -> None:
        """
        Args:
            path: the file; each line a JSON object with `prompt`, and optionally `id` (default: file name and line).
            seed: of the order.
            held_out_size: how many of the file's last tasks are kept out of training; 0 with `held_out_path`.
            held_out_path: a second file with the held-out tasks.
        Raises ConfigError if a file is missing or empty, a line is not such an object, an id is repeated, or a held-out
        prompt is also a training prompt.
        """
        tasks = _read(path)
        split = training_size(len(tasks), held_out_size, f"tasks of {path}")
        if held_out_size and held_out_path:
            raise ConfigError("data.options.held_out_size and data.options.held_out_path are both set; keep one")
        train, held_out = tasks[:split], _read(held_out_path) if held_out_path else tasks[split:]
        trained = {json.dumps(task["prompt"], sort_keys=True) for task in train}
        for task in held_out:
            if json.dumps(task["prompt"], sort_keys=True) in trained:
                raise ConfigError(f"held-out task {task['id']!r} has the prompt of a training task; remove one of them")
        super().__init__("json_lines", train, held_out, seed)


def _read(path: str) -> list[dict[str, Any]]:
    file = Path(path)
    if not file.is_file():
        raise ConfigError(
            f"data.options names {path!r}; expected a JSON lines file; give a path that exists (a relative one "
            "is looked up beside the config file, then in the current folder)"
        )
    lines = enumerate(file.read_text(encoding="utf-8").split("\n"), start=1)
    tasks = [_task(path, number, line) for number, line in lines if line.strip()]
    ids = [task["id"] for task in tasks]
    if len(set(ids)) < len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        raise ConfigError(f"{path}: the id {twice!r} appears more than once; ids must be unique")
    if not tasks:
        raise ConfigError(f"{path} holds no task; expected one JSON object per line")
    return tasks


def _task(path: str, number: int, line: str) -> dict[str, Any]:
    try:
        task = json.loads(line)
    except ValueError as error:
        raise ConfigError(
            f"{path} line {number} is not JSON: {error}; expected an object per line. data.source datasets reads "
            "parquet, CSV and JSON arrays."
        ) from error
    if not isinstance(task, dict) or not isinstance(task.get("prompt"), str | list):
        array = "; data.source datasets reads JSON arrays" if isinstance(task, list) else ""
        raise ConfigError(
            f"{path} line {number}: expected an object with `prompt`, a string or a list of messages{array}"
        )
    return {**task, "id": str(task.get("id", f"{Path(path).name}:{number}"))}
