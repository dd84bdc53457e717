"""Demonstrations in a table that Hugging Face `datasets` reads: parquet, arrow, a saved folder, the hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.data.demonstrations import chat
from asyncrl.data.sources.hugging_face import open_dataset
from asyncrl.errors import ConfigError, RunError


class ChatTable:
    """The table's rows, in memory-mapped files."""

    def __init__(self, paths: Sequence[str], split: str) -> None:
        """Reads and checks every row. Raises ConfigError."""
        given = paths[0] if len(paths) == 1 else list(paths)
        self._name = ", ".join(paths)
        try:
            rows = open_dataset(given, None, split, None, "data.demonstrations")
        except ImportError as error:
            raise ConfigError(
                f"data.demonstrations is {self._name}, which the package `datasets` reads: pip install 'asyncrl[data]'."
            ) from error
        if "messages" not in rows.column_names:
            raise ConfigError(
                f"data.demonstrations is {self._name}, which has the columns {', '.join(rows.column_names)}: expected "
                "`messages`, and optionally `tools`; rename the column in the table."
            )
        self._rows = rows.select_columns([name for name in rows.column_names if name in ("messages", "tools")])
        self.digests = [chat.digest(self._encoded(row)) for row in range(len(self._rows))]

    def chat(self, row: int) -> bytes:
        text = self._encoded(row)
        if chat.digest(text) != self.digests[row]:
            raise RunError(
                f"data.demonstrations: {self.where(row)} is no longer what it was when the run opened it: put it back."
            )
        return text

    def where(self, row: int) -> str:
        return f"{self._name} row {row}"

    def _encoded(self, row: int) -> bytes:
        return chat.encoded(_without_none(self._rows[row]), f"data.demonstrations: {self.where(row)}")


def _without_none(value: Any) -> Any:
    """Arrow gives every message the keys of all messages, and every call the arguments of all calls: those that it did
    not have are None."""
    if isinstance(value, Mapping):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_none(inner) for inner in value]
    return value
