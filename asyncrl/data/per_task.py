"""Bytes that a curriculum keeps for every task of a source."""

from __future__ import annotations

import base64

from asyncrl.errors import ConfigError


class PerTask:
    """`width` bytes per task, at first 0, and their state for the ledger."""

    def __init__(self, curriculum: str, train_size: int | None, width: int = 1) -> None:
        """`curriculum`: its name, for messages. Raises ConfigError for a source without end."""
        if train_size is None:
            raise ConfigError(
                f"data.curriculum is {curriculum}, which measures every task, and data.source has no end: use levels."
            )
        self.size, self._width = train_size, width
        self.bytes = bytearray(width * train_size)

    def state(self) -> str:
        return base64.b64encode(self.bytes).decode()

    def restore(self, state: str) -> None:
        """Raises ConfigError if the number of tasks has changed."""
        found = base64.b64decode(state)
        if len(found) != len(self.bytes):
            raise ConfigError(
                f"the ledger knows the success of {len(found) // self._width} tasks and data.source has {self.size}: "
                "the data changed since the run began. Restore the data, or start a new run."
            )
        self.bytes = bytearray(found)
