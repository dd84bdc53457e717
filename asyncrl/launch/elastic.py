"""The actors of a live run: `asyncrl actors` names them, the launcher starts and stops them.

    asyncrl actors add|remove ──> RUN/actors.json: the names ──> the launcher, at every turn of its loop:
                                                                  starts new ones, stops those no longer named,
                                                                  strikes out those that cannot start

An actor that joins fetches the newest weights and takes tickets. One that leaves finishes what it can within
`actors.drain_s` and returns its other tickets; the leases of one that vanishes lapse. The learner waits for neither.
"""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config import Config
from asyncrl.errors import ConfigError, RunError
from asyncrl.launch.preflight import living
from asyncrl.launch.roles import actor
from asyncrl.launch.supervision.process_table import ProcessTable
from asyncrl.run_folder import RunFolder, replace

if TYPE_CHECKING:
    from asyncrl.tracking.collector import Collector

NAME = re.compile(r"actor-(\d+)")


class Membership:
    """Makes the actors of a live run those that the file names."""

    def __init__(self, run: RunFolder, config: Config, table: ProcessTable, collector: Collector) -> None:
        self._run, self._config, self._table, self._collector = run, config, table, collector
        self._names = Actors(run)
        self.leaving: dict[str, float] = {}
        """Actors that were asked to leave, and when each of them is killed."""
        self._refused: set[str] = set()
        """Actors that could not start, and that the file still names."""

    def begin(self) -> None:
        self._names.begin(name for name in self._table.names if name.startswith("actor-"))

    def apply(self, now: float) -> None:
        if (wanted := self._names.changed()) is not None:
            self._change(wanted, now)
        if self._refused and self._names.strike(self._refused):
            self._refused.clear()
        for name, deadline in list(self.leaving.items()):
            process = self._table.processes[name]
            if process.ended() is not None:
                del self.leaving[name]
                self._table.remove(name)
                self._collector.exited(name, "left")
            elif now > deadline:
                process.kill("did not stop in time")

    def _change(self, wanted: Sequence[str], now: float) -> None:
        for name in wanted:
            if name not in self._table and name not in self._refused:
                self._join(name)
        for name, process in self._table.processes.items():
            if process.role.kind == "actor" and name not in (*wanted, *self.leaving):
                self.leaving[name] = now + self._config.launch.stop_s + self._config.actors.drain_s
                self._collector.event("leaves", text=name)
                process.stop()

    def _join(self, name: str) -> None:
        """Starts an actor; the run goes on without one that cannot be started."""
        try:
            self._table.join(actor(self._run, self._config, name))
        except (ConfigError, RunError) as error:
            if name in self._table:  # its process runs, and the run folder cannot be written
                raise
            self._refused.add(name)
            self._collector.event("cannot_join", why=f"{name}: {error}")
        else:
            self._collector.event("joins", text=name)


class Actors:
    """The names in the file, and whether they have changed."""

    def __init__(self, run: RunFolder) -> None:
        self._file, self._lock = _file(run), _lock(run)
        self._seen = (0, 0)

    def begin(self, names: Iterable[str]) -> None:
        """Writes the names of the config's actors; those added to an earlier launch are not among them."""
        replace(self._file, json.dumps(sorted(names)) + "\n")
        self._seen = self._mark()

    def changed(self) -> list[str] | None:
        """The names; None if they are the same as at the last call."""
        now = self._mark()
        if now == self._seen:
            return None
        self._seen = now
        return _read(self._file)

    def strike(self, names: Collection[str]) -> bool:
        """Takes `names` out of the file; False while a command holds it, which the launcher does not wait for."""
        with self._lock.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            replace(self._file, json.dumps(sorted(set(_read(self._file)) - set(names))) + "\n")
        return True

    def _mark(self) -> tuple[int, int]:
        """Identifies the file's state: files that replace each other within a tick of the clock differ in the inode."""
        stat = self._file.stat()
        return stat.st_mtime_ns, stat.st_ino


def add(run: RunFolder, count: int) -> list[str]:
    """Asks for `count` more actors; gives their names, which no actor of this run had before."""
    if count < 1:
        raise ConfigError(f"actors add is {count}: expected how many more, 1 or above.")
    file = _file(_live(run))
    with _lock(run).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        names = _read(file)
        new = fresh_names(names, (path.stem for path in run.acks.glob("actor-*.jsonl")), count)
        replace(file, json.dumps(sorted([*names, *new])) + "\n")
    return new


def remove(run: RunFolder, names: Sequence[str]) -> None:
    """Asks the named actors to leave. Raises ConfigError for an unknown name."""
    file = _file(_live(run))
    with _lock(run).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        current = _read(file)
        if unknown := set(names) - set(current):
            raise ConfigError(
                f"actors remove names {min(unknown)}, and {run.path} has no such actor: expected one of "
                f"{', '.join(current) or '(none)'}."
            )
        replace(file, json.dumps(sorted(set(current) - set(names))) + "\n")


def fresh_names(now: Iterable[str], before: Iterable[str], count: int) -> list[str]:
    """The next `count` names that neither the current nor the former actors have.

    >>> fresh_names(["actor-0"], ["actor-0", "actor-3"], 2)
    ['actor-4', 'actor-5']
    """
    taken = [int(match[1]) for name in (*now, *before) if (match := NAME.fullmatch(name))]
    first = max(taken, default=-1) + 1
    return [f"actor-{i}" for i in range(first, first + count)]


def _live(run: RunFolder) -> RunFolder:
    """Raises RunError when no launcher would act on the request."""
    # The launcher of a run over several hosts may be on another one.
    if not run.record().get("host") and "launcher" not in living(run).values():
        raise RunError(f"{run.path} is not running: asyncrl launch --resume {run.path}, with --actors.count.")
    return run


def _file(run: RunFolder) -> Path:
    return run.path / "actors.json"


def _lock(run: RunFolder) -> Path:
    return run.path / ".actors.lock"


def _read(file: Path) -> list[str]:
    try:
        names = json.loads(file.read_text())
    except FileNotFoundError:
        raise RunError(f"{file} does not exist: the run has not started.") from None
    if not isinstance(names, list) or not all(isinstance(n, str) and NAME.fullmatch(n) for n in names):
        raise RunError(f"{file} does not hold a list of names such as actor-0.")
    return names
