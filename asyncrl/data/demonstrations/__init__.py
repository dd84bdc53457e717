"""Demonstrations (`data.demonstrations`): chats whose assistant messages are trained on. They are read here, and
numbered in the order in which batches take them; the learner renders them.

    row     its place in the files: 0, 1, 2 ...
    draw    0, 1, 2 ... over the run; draw d is of a row that follows from `data.seed`: every row once per epoch
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

from asyncrl.config import Config
from asyncrl.data.demonstrations.json_lines import ChatLines
from asyncrl.data.demonstrations.tables import ChatTable
from asyncrl.data.order import EpochOrder
from asyncrl.errors import ConfigError

LINES = (".jsonl", ".json", ".ndjson")


class Chats(Protocol):
    """The rows of `data.demonstrations`, checked once at opening."""

    @property
    def digests(self) -> Sequence[bytes]:
        """Digest of each row, 16 bytes."""
        ...

    def chat(self, row: int) -> bytes:
        """The row as JSON (`chat.py`). Raises RunError if it is no longer what it was at opening."""
        ...

    def where(self, row: int) -> str:
        """File and line, for messages."""
        ...


class Demonstrations:
    """The rows in the order in which they are drawn."""

    def __init__(self, chats: Chats, seed: int) -> None:
        self.chats = chats
        self.size = len(chats.digests)
        self.digest = hashlib.blake2b(b"".join(chats.digests), digest_size=16).hexdigest()
        """Digest of all rows, in the order of the files."""
        self._order = EpochOrder("demonstrations", seed, self.size)

    def row(self, draw: int) -> int:
        """The row of a draw."""
        return self._order.position(draw)

    def digest_of(self, row: int) -> str:
        return self.chats.digests[row].hex()


def open_demonstrations(config: Config) -> Demonstrations | None:
    """`data.demonstrations`, every row checked; None: there are none. Raises ConfigError, naming file, line and
    remedy."""
    paths = config.data.demonstrations
    if not paths:
        return None
    lines = [path.endswith(LINES) for path in paths]
    if any(lines) and not all(lines):
        raise ConfigError(
            f"data.demonstrations is {list(paths)}: JSON lines beside another kind of file; give files of one kind."
        )
    chats: Chats = ChatLines(paths) if all(lines) else ChatTable(paths, config.data.demonstrations_split)
    if not chats.digests:
        raise ConfigError(
            f"data.demonstrations is {list(paths)}, which holds no row: give a file with one chat per line "
            '({"messages": [...]}).'
        )
    return Demonstrations(chats, config.data.seed)
