"""Which actors a live run has: `asyncrl actors` says it, the launcher makes it so.

    asyncrl actors add|remove ──> RUN/actors.json: the names ──> the launcher, at every turn of its loop:
                                                                  starts who is new, stops who is no longer named

An actor that joins fetches the newest weights and takes tickets. One that leaves finishes what it can within
`actors.drain_s` and gives the rest back; of one that vanishes the leases lapse. The learner waits for neither.
"""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from asyncrl.errors import ConfigError, RunError
from asyncrl.launch.preflight import living
from asyncrl.run_folder import RunFolder, replace

NAME = re.compile(r"actor-(\d+)")


class Actors:
    """The names in the file, and whether they are other ones than before."""

    def __init__(self, run: RunFolder) -> None:
        self._file = _file(run)
        self._seen = (0, 0)

    def begin(self, names: Iterable[str]) -> None:
        """With the actors of the config: what was added to an earlier launch is not there."""
        replace(self._file, json.dumps(sorted(names)) + "\n")
        self._seen = self._mark()

    def changed(self) -> list[str] | None:
        """None: the same as when this was asked last."""
        now = self._mark()
        if now == self._seen:
            return None
        self._seen = now
        return _read(self._file)

    def _mark(self) -> tuple[int, int]:
        """Of the file as it is now: two that replace each other within a tick of the clock are still two inodes."""
        found = self._file.stat()
        return found.st_mtime_ns, found.st_ino


def add(run: RunFolder, count: int) -> list[str]:
    """Asks for so many more; gives their names, which no actor of this run had before."""
    if count < 1:
        raise ConfigError(f"actors add is {count}: expected how many more, 1 or above.")
    file = _file(_live(run))
    with (run.path / ".actors.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        names = _read(file)
        new = fresh_names(names, (path.stem for path in run.acks.glob("actor-*.jsonl")), count)
        replace(file, json.dumps(sorted([*names, *new])) + "\n")
    return new


def remove(run: RunFolder, names: Sequence[str]) -> None:
    """Asks for these to leave. Raises ConfigError when there is none of that name."""
    file = _file(_live(run))
    with (run.path / ".actors.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        there = _read(file)
        if unknown := set(names) - set(there):
            raise ConfigError(
                f"actors remove names {min(unknown)}, and {run.path} has no such actor: expected one of "
                f"{', '.join(there) or '(none)'}."
            )
        replace(file, json.dumps(sorted(set(there) - set(names))) + "\n")


def fresh_names(now: Iterable[str], before: Iterable[str], count: int) -> list[str]:
    """
    >>> fresh_names(["actor-0"], ["actor-0", "actor-3"], 2)
    ['actor-4', 'actor-5']
    """
    taken = [int(match[1]) for name in (*now, *before) if (match := NAME.fullmatch(name))]
    first = max(taken, default=-1) + 1
    return [f"actor-{i}" for i in range(first, first + count)]


def _live(run: RunFolder) -> RunFolder:
    """Raises RunError when nobody would do what is asked."""
    # The launcher of a run over several hosts may be on another one.
    if not run.record().get("host") and "launcher" not in living(run).values():
        raise RunError(f"{run.path} is not running: asyncrl launch --resume {run.path}, with --actors.count.")
    return run


def _file(run: RunFolder) -> Path:
    return run.path / "actors.json"


def _read(file: Path) -> list[str]:
    try:
        names = json.loads(file.read_text())
    except FileNotFoundError:
        raise RunError(f"{file} is not there: the run has not started.") from None
    if not isinstance(names, list) or not all(isinstance(n, str) and NAME.fullmatch(n) for n in names):
        raise RunError(f"{file} does not hold a list of names such as actor-0.")
    return names
