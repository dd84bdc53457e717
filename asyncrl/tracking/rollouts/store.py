"""The samples on the disk: one file per (branch, batch) in `RUN/rollouts`, so that a batch that is redone writes over.

All of them keep under `tracking.rollouts_mb`: past it files are removed where they lie closest, so that what stays is
spread evenly over the whole run.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from asyncrl.errors import RunError
from asyncrl.tracking.rollouts.sample import Rollout, decode, encode

MOST_FILES = 4096
_SHARE = 8
"""One file takes at most this part of the whole: further trajectories of its batch are left out."""
_NAME = re.compile(r"(\d+)-(\d+)\.jsonl")

Key = tuple[int, int]
"""Branch and batch."""


class Store:
    """The writing end; one process at a time."""

    def __init__(self, folder: Path, most_mb: float) -> None:
        self._folder, self._most = folder, int(most_mb * 1e6)
        folder.mkdir(exist_ok=True)
        self._sizes = {key: path.stat().st_size for key, path in files(folder).items()}

    def write(self, rollouts: Sequence[Rollout]) -> None:
        """Writes those of one batch over what there was of it, then removes what exceeds the bounds. Raises OSError."""
        if not rollouts:
            return
        key = rollouts[0].branch, rollouts[0].batch
        data = b"".join(_fitting(rollouts, self._most // _SHARE))
        _replace(path_of(self._folder, key), data)
        self._sizes[key] = len(data)
        for old in surplus(self._sizes, self._most, MOST_FILES):
            path_of(self._folder, old).unlink(missing_ok=True)
            del self._sizes[old]


def _fitting(rollouts: Sequence[Rollout], most: int) -> Iterator[bytes]:
    """The lines that fit into `most` bytes; the first in any case."""
    size = 0
    for rollout in rollouts:
        line = encode(rollout)
        size += len(line)
        if size > most and size > len(line):
            return
        yield line


def surplus(sizes: Mapping[Key, int], most_bytes: int, most_files: int) -> list[Key]:
    """The files to remove, none within the bounds: first where the batches lie closest, never the newest.

    >>> surplus({(0, b): 10 for b in (0, 4, 8, 9, 10)}, most_bytes=30, most_files=9)
    [(0, 9), (0, 8)]
    """
    kept, removed = sorted(sizes, key=lambda key: (key[1], key[0])), []
    size = sum(sizes.values())
    while len(kept) > 1 and (len(kept) > most_files or size > most_bytes):
        inner = range(1, len(kept) - 1)
        place = min(inner, key=lambda i: kept[i + 1][1] - kept[i - 1][1], default=0)
        removed.append(kept.pop(place))
        size -= sizes[removed[-1]]
    return removed


def files(folder: Path) -> dict[Key, Path]:
    """The files by branch and batch, in the order of the batches."""
    found = {}
    for path in folder.glob("*.jsonl") if folder.is_dir() else ():
        if (match := _NAME.fullmatch(path.name)) is not None:
            found[int(match[1]), int(match[2])] = path
    return dict(sorted(found.items(), key=lambda item: (item[0][1], item[0][0])))


def read(path: Path) -> list[Rollout]:
    """The samples of one file; none if it has just been removed. Raises RunError for a damaged one."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from error
    return decode(data.splitlines(), str(path))


def read_all(folder: Path) -> Iterator[Rollout]:
    """Every sample, batch by batch. Raises RunError."""
    for path in files(folder).values():
        yield from read(path)


def path_of(folder: Path, key: Key) -> Path:
    """The file of one batch."""
    return folder / f"{key[0]:04d}-{key[1]:08d}.jsonl"


def _replace(path: Path, data: bytes) -> None:
    """A reader sees the old file or the new one. Only its owner can read it, as the payloads. Raises OSError, and
    leaves nothing of the new one then: the disk may be full."""
    temporary = path.with_name(f".{path.name}")
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(data)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
