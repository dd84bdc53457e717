"""Demonstrations in files of JSON lines, which stay on the disk: what is kept in memory is where each line begins."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from asyncrl.data.demonstrations import chat
from asyncrl.errors import ConfigError, RunError


class ChatLines:
    """The lines of the files, one after the other; empty lines are passed over."""

    def __init__(self, paths: Sequence[str]) -> None:
        """Reads and checks every line. Raises ConfigError."""
        self.digests: list[bytes] = []
        self._paths = paths
        self._files = [_opened(path) for path in paths]
        """Kept open: a file that is replaced under a run is still read as it was."""
        self._file, self._line, self._start = array("l"), array("q"), array("q")
        for number, file in enumerate(self._files):
            before = len(self.digests)
            for line, start, text in _lines(file, paths[number]):
                row = _parsed(text, f"data.demonstrations: {paths[number]} line {line}")
                self.digests.append(chat.digest(row))
                self._file.append(number)
                self._line.append(line)
                self._start.append(start)
            if len(self.digests) == before:
                raise ConfigError(
                    f"data.demonstrations names {paths[number]}, which is empty: expected one JSON object per line "
                    '({"messages": [...]}).'
                )

    def chat(self, row: int) -> bytes:
        file = self._files[self._file[row]]
        file.seek(self._start[row])
        try:
            text = _parsed(file.readline(_MAX_LINE), self.where(row))
        except ConfigError as error:
            raise _changed(self.where(row)) from error
        if chat.digest(text) != self.digests[row]:
            raise _changed(self.where(row))
        return text

    def where(self, row: int) -> str:
        return f"{self._paths[self._file[row]]} line {self._line[row]}"


_MAX_LINE = 2 * chat.MAX_BYTES
"""JSON may write a character with several times as many bytes."""


def _opened(path: str) -> BinaryIO:
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise ConfigError(
            f"data.demonstrations names {path!r}, which cannot be read ({error.strerror}); expected a file of JSON "
            "lines, parquet, a folder of save_to_disk or a hub name; a relative path is looked up beside the config "
            "file, then in the current folder."
        ) from error


def _lines(file: BinaryIO, path: str) -> Iterator[tuple[int, int, bytes]]:
    """Number, start and bytes of each line that is not empty."""
    number, start = 0, 0
    while text := file.readline(_MAX_LINE + 1):
        number += 1
        if len(text) > _MAX_LINE:
            raise ConfigError(
                f"data.demonstrations: {path} line {number} has more than {_MAX_LINE} bytes: split the chat, and write "
                "one JSON object per line."
            )
        if text.strip():
            yield number, start, text
        start += len(text)


def _parsed(text: bytes, where: str) -> bytes:
    try:
        row: Any = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ConfigError(f"{where} is not JSON: {error}; expected one object per line.") from error
    return chat.encoded(row, where)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _changed(where: str) -> RunError:
    return RunError(
        f"data.demonstrations: {where} is no longer what it was when the run opened it: put the file back as it was."
    )
