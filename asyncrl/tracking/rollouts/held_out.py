"""Answers of held-out tasks, kept at every evaluation (`tracking.held_out`): written by the buffer, read by anyone.

One file per evaluation, RUN/rollouts/held_out/<branch>-<due>.jsonl, with a line per episode of the first tasks of each
set. A line holds the trajectory as it was put; its text is that of its tokens. All files keep under
`tracking.rollouts_mb`: past it evaluations are removed where they lie closest.
"""

from __future__ import annotations

import logging
from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path

import msgspec

from asyncrl.errors import RunError
from asyncrl.tracking.rollouts.store import MOST_FILES, Key, files, path_of, surplus
from asyncrl.trajectory import Count

log = logging.getLogger(__name__)

FORMAT = 1
_SHARE = 8
"""The answers of one evaluation take at most this part of the whole."""


class About(msgspec.Struct, frozen=True):
    """Which answer a line holds."""

    format: int
    set: str
    task: Count
    """Its number in the set."""
    task_id: str
    index: Count
    """Index of the episode: first the sampled ones, behind them the greedy one."""
    greedy: bool
    branch: int
    due: int
    """The version at which the evaluation was due."""
    version: tuple[int, int]
    """Branch and version of the weights that played it."""
    reward: float


class Answer(About, frozen=True):
    record: str
    """The trajectory's record as it was put, base64; empty: it was too long to be kept."""

    @property
    def payload(self) -> bytes:
        """Raises ValueError."""
        return b64decode(self.record, validate=True)


_ABOUT, _ANSWER = msgspec.json.Decoder(About), msgspec.json.Decoder(Answer)


class Answers:
    """The writing end; one process at a time. What cannot be written is left out, with one warning."""

    def __init__(self, folder: Path, tasks: int, most_mb: float) -> None:
        """`tasks`: of each set, so many are kept; the first ones, so that each evaluation has the same."""
        self._folder, self.tasks, self._most = folder, tasks, int(most_mb * 1e6)
        self._warned = False

    def add(self, about: About, record: bytes) -> None:
        fields = {name: getattr(about, name) for name in About.__struct_fields__}
        fits = 2 * len(record) <= self._most // _SHARE
        line = msgspec.json.encode(Answer(**fields, record=b64encode(record).decode() if fits else "")) + b"\n"
        path = path_of(self._folder, (about.branch, about.due))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            size = path.stat().st_size if path.exists() else 0
            if size + len(line) <= self._most // _SHARE:
                _append(path, line)
            if not size:
                self._thin()
        except OSError as error:
            if not self._warned:
                log.warning("tracking.held_out: answers are left out: %s", error)
            self._warned = True

    def _thin(self) -> None:
        sizes = {key: path.stat().st_size for key, path in files(self._folder).items()}
        # What comes may take its whole share.
        for old in surplus(sizes, self._most - self._most // _SHARE, MOST_FILES):
            path_of(self._folder, old).unlink(missing_ok=True)


def _append(path: Path, line: bytes) -> None:
    """A part of a line, left by a kill or a full disk, is ended by a line break first: it is passed over by readers."""
    with path.open("ab+") as file:
        path.chmod(0o600)
        if file.tell():
            file.seek(-1, 2)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line)


def abouts(path: Path) -> list[tuple[About, int]]:
    """What the lines of a file hold, and where each begins; the last of several for one episode. Raises RunError."""
    found: dict[tuple[str, int, int], tuple[About, int]] = {}
    place = 0
    try:
        for line in path.read_bytes().splitlines(keepends=True):
            about = _read(line)
            if about is not None:
                found[about.set, about.task, about.index] = (about, place)
            place += len(line)
    except FileNotFoundError:  # removed just now
        return []
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from error
    return list(found.values())


def _read(line: bytes) -> About | None:
    try:
        about = _ABOUT.decode(line)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return about if about.format == FORMAT else None


def answer(path: Path, place: int) -> Answer:
    """The answer in the line that begins at `place`. Raises RunError for a damaged one."""
    try:
        with path.open("rb") as file:
            file.seek(place)
            return _ANSWER.decode(file.readline())
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise RunError(f"{path} holds no answer at byte {place} ({error}): it was removed or changed.") from error


def read_all(folder: Path) -> Iterator[Answer]:
    """Every answer, evaluation by evaluation. Raises RunError."""
    for path in files(folder).values():
        for _, place in abouts(path):
            yield answer(path, place)


def evaluations(folder: Path) -> dict[Key, Path]:
    """The files by branch and due version."""
    return files(folder)
