"""Tasks from a table that Hugging Face `datasets` reads: parquet, JSON lines, arrow, CSV, a saved folder, the hub."""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.data.base import Task
from asyncrl.data.columns import Columns
from asyncrl.data.order import EpochOrder, training_size
from asyncrl.data.prompt_fit import Prompt, PromptLimit
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)
BUILDERS = {
    ".parquet": "parquet", ".jsonl": "json", ".json": "json", ".ndjson": "json", ".arrow": "arrow", ".csv": "csv",
}  # fmt: skip
Place = tuple[int, int]
"""(table, row)"""


@dataclass(eq=False, kw_only=True)
class HeldOut:
    """Which rows are kept out of training: options of a source."""

    held_out_size: int = 0
    """How many rows, drawn by `seed`, are kept out of training; once open, how many there are."""
    held_out_path: str | list[str] | None = None
    """The held-out rows' own files: all of them, or the first `held_out_size`."""
    held_out_split: str | None = None
    """The held-out rows' own split, likewise."""
    seed: int = 0

    def _split(self, places: Sequence[Place], tables: int) -> tuple[list[Place], list[Place]]:
        """Places to train on, and those held out."""
        size = self.held_out_size
        if tables == 2:
            held = [place for place in places if place[0] == 1]
            return [place for place in places if place[0] == 0], held[: size or None]
        training_size(len(places), size, "rows")
        chosen = set(random.Random(f"held_out/{self.seed}").sample(range(len(places)), size))
        return [p for i, p in enumerate(places) if i not in chosen], [p for i, p in enumerate(places) if i in chosen]


@dataclass(eq=False)
class DatasetSource(HeldOut, PromptLimit, Columns):
    """A dataset, whose rows stay in memory-mapped files and become tasks when they are drawn."""

    path: str | list[str]
    """A file, several, a pattern (`train-*.parquet`), a folder of `save_to_disk`, or a hub name."""
    _: KW_ONLY
    name: str | None = None
    """Configuration of a hub dataset."""
    split: str = "train"
    """Split of a hub dataset or a saved folder."""
    revision: str | None = None
    """Revision of a hub dataset."""

    def __post_init__(self) -> None:
        """Raises ConfigError naming the file, the row, the column."""
        self._tables = self._open()
        places = [(t, row) for t, table in enumerate(self._tables) for row in range(len(table))]
        prompts = {place: self._row(place)["prompt"] for place in places}
        kept, self._cut = self._fit(prompts, lambda place: f"{self._tables[place[0]].stem}:{place[1]}")
        train, self._held_out = self._split(kept, len(self._tables))
        held_out = {_digest(prompts[place]) for place in self._held_out}
        self._train = [place for place in train if _digest(prompts[place]) not in held_out]
        if duplicates := len(train) - len(self._train):
            log.warning("%d training rows have the prompt of a held-out one: left out", duplicates)
        if not self._train:
            raise ConfigError(f"data.options.path is {self.path!r}: no row is left for training. Hold fewer out.")
        self._order = EpochOrder("datasets", self.seed, len(self._train))
        self.train_size: int | None = len(self._train)
        self.held_out_size = len(self._held_out)

    def _open(self) -> list[_Table]:
        """The table to train on and, if they have their own, the one of held-out rows."""
        dropped, only = self.drop_columns or [], self.where or {}
        stem = _stem(self.path, self.split)
        tables = [_Table(open_dataset(self.path, self.name, self.split, self.revision), stem, dropped, only)]
        if self.held_out_path or self.held_out_split:
            path, split = self.held_out_path or self.path, self.held_out_split or self.split
            held_out = _stem(path, split)
            name = f"held_out/{held_out}" if held_out == stem else held_out
            tables.append(_Table(open_dataset(path, self.name, split, self.revision), name, dropped, only))
        return tables

    def task(self, index: int) -> Task:
        return self._task(self._train[self._order.position(index)])

    def held_out(self, index: int) -> Task:
        if not 0 <= index < self.held_out_size:
            raise IndexError(f"held-out task {index}: expected 0 <= index < {self.held_out_size}")
        return self._task(self._held_out[index])

    def _row(self, place: Place) -> Task:
        return self._task_of(*self._tables[place[0]][place[1]])

    def _task(self, place: Place) -> Task:
        task = self._row(place)
        return task if place not in self._cut else {**task, "prompt": self._cut[place]}


class _Table:
    """Rows and their names."""

    def __init__(self, rows: Dataset, stem: str, dropped: Sequence[str], only: Mapping[str, Any]) -> None:
        for column in only:
            if column not in rows.column_names:
                raise ConfigError(f"data.options.where names {column!r}: {stem} has {', '.join(rows.column_names)}.")
        self._numbers = _matching(rows, only) if only else range(len(rows))
        if unknown := sorted(set(dropped) - set(rows.column_names)):
            raise ConfigError(
                f"data.options.drop_columns names {unknown[0]!r}: {stem} has {', '.join(rows.column_names)}."
            )
        self.rows, self.stem = rows.remove_columns(list(dropped)), stem
        for column, feature in self.rows.features.items():
            if kind := _not_carried(feature):
                raise ConfigError(
                    f"{stem}: column {column!r} holds {kind}, which a ticket cannot carry: name it in "
                    "data.options.drop_columns."
                )
        if not self._numbers:
            raise ConfigError(f"{stem} holds no row{f' with {dict(only)}' if only else ''}; expected one task per row.")

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, row: int) -> tuple[dict[str, Any], str]:
        """The row and its name, which holds its number in the file, before `where` left out others."""
        return self.rows[self._numbers[row]], f"{self.stem}:{self._numbers[row]}"


def _matching(rows: Dataset, only: Mapping[str, Any]) -> Sequence[int]:
    columns = [rows[column] for column in only]
    return [i for i, values in enumerate(zip(*columns, strict=True)) if list(values) == list(only.values())]


def open_dataset(
    path: str | list[str], name: str | None, split: str, revision: str | None, field: str = "data.options.path"
) -> Dataset:
    """The rows that `field` names. Raises ConfigError."""
    import datasets

    datasets.disable_progress_bars()
    files = [path] if isinstance(path, str) else list(path)
    suffixes = {Path(file).suffix for file in files}
    try:
        if suffixes <= BUILDERS.keys():
            builder = {BUILDERS[suffix] for suffix in suffixes}
            if len(builder) != 1:
                raise ConfigError(f"{field} is {path!r}: files of different kinds; give files of one.")
            return datasets.load_dataset(builder.pop(), data_files={split: files}, split=split)
        if len(files) == 1 and (Path(files[0]) / "state.json").is_file():
            return datasets.load_from_disk(files[0])
        if len(files) == 1 and (Path(files[0]) / "dataset_dict.json").is_file():
            return datasets.load_from_disk(files[0])[split]
        return datasets.load_dataset(files[0], name, split=split, revision=revision)
    # The errors of datasets, arrow and the hub are all of these kinds.
    except (OSError, ValueError, KeyError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"{field} is {path!r} (split {split!r}), which cannot be read: {type(error).__name__}: {why}. "
            f"Expected files ({', '.join(BUILDERS)}), a folder written by save_to_disk, or a hub name; a relative path "
            "is looked up beside the config file, then in the current folder."
        ) from error


def _stem(path: str | list[str], split: str) -> str:
    first = path if isinstance(path, str) else path[0]
    return Path(first).name if Path(first).suffix in BUILDERS else f"{first}/{split}"


def _not_carried(feature: Any) -> str | None:
    """The first kind in a column's type that is not a text, number, list or mapping."""
    if isinstance(feature, dict):
        return next((kind for inner in feature.values() if (kind := _not_carried(inner))), None)
    inner = getattr(feature, "feature", None)
    if inner is not None:
        return _not_carried(inner)
    dtype = getattr(feature, "dtype", type(feature).__name__)
    carried = ("Value", "ClassLabel", "Json")
    return None if type(feature).__name__ in carried and not dtype.startswith("decimal") else dtype


def _digest(prompt: Prompt) -> bytes:
    return hashlib.blake2b(json.dumps(prompt).encode(), digest_size=16).digest()
