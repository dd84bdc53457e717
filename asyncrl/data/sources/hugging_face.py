"""Tasks from a table that Hugging Face `datasets` reads: parquet, JSON lines, arrow, CSV, a saved folder, the hub."""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.data.base import Task
from asyncrl.data.columns import row_task
from asyncrl.data.order import EpochOrder
from asyncrl.data.prompt_fit import OverLong, Prompt, fit_prompts
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)
BUILDERS = {
    ".parquet": "parquet", ".jsonl": "json", ".json": "json", ".ndjson": "json", ".arrow": "arrow", ".csv": "csv",
}  # fmt: skip
Place = tuple[int, int]
"""(table, row)"""


class DatasetSource:
    """Rows stay in memory-mapped files and are made into tasks when they are asked for."""

    def __init__(
        self,
        path: str | list[str],
        *,
        name: str | None = None,
        split: str = "train",
        revision: str | None = None,
        columns: dict[str, str] | None = None,
        drop_columns: list[str] | None = None,
        where: dict[str, Any] | None = None,
        prompt_template: str | None = None,
        system_prompt: str | None = None,
        constants: dict[str, Any] | None = None,
        held_out_size: int = 0,
        held_out_path: str | list[str] | None = None,
        held_out_split: str | None = None,
        max_prompt_tokens: int | None = None,
        over_long: OverLong = "error",
        workers: int | None = None,
        seed: int = 0,
        model: str = "quickstart",
    ) -> None:
        """
        Args:
            path: a file, several, a pattern (`train-*.parquet`), a folder of `save_to_disk`, or a hub name.
            name, split, revision: of a hub dataset; `split` of a saved folder too.
            columns, prompt_template, system_prompt, constants: see `row_task`.
            drop_columns: columns left out, e.g. images, which a ticket cannot carry.
            where: only rows with these values, by column: `{ability: code}`.
            held_out_size: how many rows, drawn by `seed`, are kept out of training.
            held_out_path, held_out_split: the held-out rows' own files, or split; all of them, or the first
                `held_out_size`.
            max_prompt_tokens: a longer prompt is treated as `over_long` says; None: lengths are not looked at.
            over_long: error, drop, truncate_left (the end stays) or truncate_middle (both ends stay).
            workers: processes that count tokens; None: one per core.
            model: whose tokenizer counts; asyncrl passes `model.path`.
        Raises ConfigError naming the file, the row, the column.
        """
        options: Mapping[str, Any] = {
            "columns": columns or {},
            "prompt_template": prompt_template,
            "system_prompt": system_prompt,
            "constants": constants,
        }
        self._options = options
        dropped, only = drop_columns or [], where or {}
        self._tables = [_Table(_open(path, name, split, revision), _stem(path, split), dropped, only)]
        if held_out_path or held_out_split:
            other = _open(held_out_path or path, name, held_out_split or split, revision)
            stem = _stem(held_out_path or path, held_out_split or split)
            same = stem == self._tables[0].stem
            self._tables.append(_Table(other, f"held_out/{stem}" if same else stem, dropped, only))
        prompts = [[row_task(*table[row], **options)["prompt"] for row in range(len(table))] for table in self._tables]
        kept, self._cut = _fitting(self._tables, prompts, max_prompt_tokens, over_long, workers, model)
        train, self._held_out = _split(kept, len(self._tables), held_out_size, seed)
        held = {_digest(prompts[table][row]) for table, row in self._held_out}
        self._train = [place for place in train if _digest(prompts[place[0]][place[1]]) not in held]
        if lost := len(train) - len(self._train):
            log.warning("%d training rows have the prompt of a held-out one: left out", lost)
        if not self._train:
            raise ConfigError(f"data.options.path is {path!r}: no row is left for training. Hold fewer out.")
        self._order = EpochOrder("datasets", seed, len(self._train))
        self.train_size: int | None = len(self._train)
        self.held_out_size = len(self._held_out)

    def task(self, index: int) -> Task:
        return self._task(self._train[self._order.position(index)])

    def held_out(self, index: int) -> Task:
        if not 0 <= index < self.held_out_size:
            raise IndexError(f"held-out task {index}: expected 0 <= index < {self.held_out_size}")
        return self._task(self._held_out[index])

    def _task(self, place: Place) -> Task:
        row, where = self._tables[place[0]][place[1]]
        task = row_task(row, where, **self._options)
        return task if place not in self._cut else {**task, "prompt": self._cut[place]}


class _Table:
    """Rows and what they are called."""

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
        """The row, and what it is called: by its number in the file, whatever `where` left out."""
        return self.rows[self._numbers[row]], f"{self.stem}:{self._numbers[row]}"


def _matching(rows: Dataset, only: Mapping[str, Any]) -> Sequence[int]:
    columns = [rows[column] for column in only]
    return [i for i, values in enumerate(zip(*columns, strict=True)) if list(values) == list(only.values())]


def _open(path: str | list[str], name: str | None, split: str, revision: str | None) -> Dataset:
    import datasets

    datasets.disable_progress_bars()
    files = [path] if isinstance(path, str) else list(path)
    suffixes = {Path(file).suffix for file in files}
    try:
        if suffixes <= BUILDERS.keys():
            builder = {BUILDERS[suffix] for suffix in suffixes}
            if len(builder) != 1:
                raise ConfigError(f"data.options.path is {path!r}: files of different kinds; give files of one.")
            return datasets.load_dataset(builder.pop(), data_files={split: files}, split=split)
        if len(files) == 1 and (Path(files[0]) / "state.json").is_file():
            return datasets.load_from_disk(files[0])
        if len(files) == 1 and (Path(files[0]) / "dataset_dict.json").is_file():
            return datasets.load_from_disk(files[0])[split]
        return datasets.load_dataset(files[0], name, split=split, revision=revision)
    # Its own errors, arrow's and the hub's are all of these kinds.
    except (OSError, ValueError, KeyError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"data.options.path is {path!r} (split {split!r}), which cannot be read: {type(error).__name__}: {said}. "
            f"Expected files ({', '.join(BUILDERS)}), a folder written by save_to_disk, or a hub name; a relative path "
            "is looked up beside the config file, then in the folder where the command is given."
        ) from error


def _stem(path: str | list[str], split: str) -> str:
    first = path if isinstance(path, str) else path[0]
    return Path(first).name if Path(first).suffix in BUILDERS else f"{first}/{split}"


def _not_carried(feature: Any) -> str | None:
    """The first kind in a column's type that is no text, number, list or mapping."""
    if isinstance(feature, dict):
        return next((kind for inner in feature.values() if (kind := _not_carried(inner))), None)
    inner = getattr(feature, "feature", None)
    if inner is not None:
        return _not_carried(inner)
    dtype = getattr(feature, "dtype", type(feature).__name__)
    carried = ("Value", "ClassLabel", "Json")
    return None if type(feature).__name__ in carried and not dtype.startswith("decimal") else dtype


def _fitting(
    tables: Sequence[_Table],
    prompts: Sequence[Sequence[Prompt]],
    max_tokens: int | None,
    over_long: OverLong,
    workers: int | None,
    model: str,
) -> tuple[list[Place], dict[Place, Prompt]]:
    """Places whose prompt fits or is made to, and the cut prompts."""
    places = [(t, row) for t, table in enumerate(tables) for row in range(len(table))]
    if max_tokens is None:
        return places, {}
    fits = fit_prompts([prompts[t][row] for t, row in places], model, max_tokens, over_long, workers)
    too_long = [(place, fit) for place, fit in zip(places, fits, strict=True) if fit.tokens > max_tokens]
    if not too_long:
        return places, {}
    (table, row), worst = max(too_long, key=lambda found: found[1].tokens)
    said = f"{len(too_long)} of {len(places)} prompts have more than {max_tokens} tokens"
    if over_long == "error":
        raise ConfigError(
            f"data.options.max_prompt_tokens is {max_tokens}, and {said} ({tables[table].stem}:{row} has "
            f"{worst.tokens}): set data.options.over_long to drop, truncate_left or truncate_middle, or raise it."
        )
    log.warning("%s: %s", said, "dropped" if over_long == "drop" else "cut")
    if over_long == "drop":
        gone = {place for place, _ in too_long}
        return [place for place in places if place not in gone], {}
    return places, {place: fit.cut for place, fit in too_long if fit.cut is not None}


def _split(kept: Sequence[Place], tables: int, held_out_size: int, seed: int) -> tuple[list[Place], list[Place]]:
    if tables == 2:
        held = [place for place in kept if place[0] == 1]
        return [place for place in kept if place[0] == 0], held[: held_out_size or None]
    if not 0 <= held_out_size < len(kept):
        raise ConfigError(
            f"data.options.held_out_size is {held_out_size}; expected less than the {len(kept)} rows, so that some are "
            "left for training."
        )
    chosen = set(random.Random(f"held_out/{seed}").sample(range(len(kept)), held_out_size))
    return [p for i, p in enumerate(kept) if i not in chosen], [p for i, p in enumerate(kept) if i in chosen]


def _digest(prompt: Prompt) -> bytes:
    return hashlib.blake2b(json.dumps(prompt).encode(), digest_size=16).digest()
