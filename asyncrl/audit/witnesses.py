"""The witnesses of a run, each read from its own place, so that a mistake of one cannot have altered another.

the data seed          which task every draw must have been        buffer/tasks/sources.py, the task source
the actors' logs       what each was told is stored                acks/<actor>.jsonl
the learner's lists    which groups, of which digest, it trained   checkpoints/*/batches.jsonl
the learner's reports  what it published                           events.jsonl
the payloads           what was stored, byte by byte               buffer/payloads/*.segment
the ledger             the account that all of them must support   buffer/ledger.sqlite
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncrl.audit.ledger import LedgerRows, TrajectoryRow, read_ledger
from asyncrl.audit.payloads import PayloadFiles
from asyncrl.buffer.ledger.snapshot import stored
from asyncrl.buffer.selection import FILTERS, Filter
from asyncrl.buffer.tasks.added_tasks import task_of as added_task
from asyncrl.buffer.tasks.sources import open_curriculum, open_source
from asyncrl.config import Config, resuming
from asyncrl.data.base import Curriculum
from asyncrl.data.checked import readable
from asyncrl.data.group_sizes import GroupSizes
from asyncrl.errors import ConfigError, RunError
from asyncrl.learner.checkpoints.checkpoints import Done, changed_files, complete, read_list
from asyncrl.plugins import resolve
from asyncrl.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class Ack:
    """One line of an actor's log."""

    branch: int
    group: int
    index: int
    attempt: int
    digest: str


@dataclass(frozen=True, slots=True)
class AckLines:
    actor: str
    acks: list[Ack]
    missing: list[int]
    """Numbers of missing lines."""
    unreadable: list[int]
    """Numbers, from 1, of lines that hold no acknowledgement."""


@dataclass(frozen=True, slots=True)
class LearnerList:
    """The batches that the learner recorded as done in one checkpoint."""

    checkpoint: str
    branch: int
    batch: int
    """The next batch: the list names those before it."""
    done: list[Done]
    changed: tuple[str, ...] = ()
    """Files of the checkpoint that are not what was written."""


@dataclass(frozen=True, slots=True)
class Publication:
    """Weights that the learner reported as published."""

    branch: int
    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the run's configuration allows."""

    groups_per_step: int
    max_uses: int
    max_staleness: int
    over_age: str
    mask_min_kept: float
    requeue: bool = True
    filters: tuple[Filter, ...] = ()
    filter_max_ratio: float = 4.0
    starved_ends: bool = False
    """Whether the run ends when filters have used up their allowance (`buffer.on_starved`)."""
    env_retries: int = 2
    group_scored: bool = False

    @classmethod
    def of(cls, c: Config) -> Bounds:
        """Raises ConfigError for an unknown filter."""
        b = c.buffer
        try:
            filters = tuple(resolve(name, FILTERS, "buffer.filters") for name in b.filters)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return cls(
            c.learner.groups_per_step,
            b.max_uses,
            b.max_staleness,
            b.over_age,
            b.mask_min_kept,
            requeue=b.requeue,
            filters=filters,
            filter_max_ratio=b.filter_max_ratio,
            starved_ends=b.on_starved == "end",
            env_retries=c.env.retries,
            group_scored=bool(c.env.group_score),
        )


@dataclass(frozen=True, slots=True)
class Evidence:
    ledger: LedgerRows
    acks: list[AckLines]
    lists: list[LearnerList]
    """Oldest first."""
    task_of: Callable[[int], tuple[str, int]]
    """Id of the task at an index, and the size of its group, recomputed from the data seed."""
    curriculum: Curriculum
    payload: Callable[[TrajectoryRow], bytes]
    bounds: Bounds
    rules: tuple[Bounds, ...]
    """Those of every configuration that the run had, the latest last."""
    published: tuple[Publication, ...] = ()
    settings: tuple[Mapping[str, Any], ...] = ({},)
    """What decided the result of a training step under every configuration that the run had."""


def gather(run: RunFolder, config: Config, payloads: PayloadFiles) -> Evidence:
    """Read every witness. Raises RunError or ConfigError if one cannot be read at all.

    The ledger is read last: on a live run it then holds everything that the others recorded.
    """
    acks = [read_acks(path) for path in sorted(run.acks.glob("*.jsonl"))]
    lists = [done for path in complete(run.checkpoints) if (done := _list(path)) is not None]
    published = read_publications(run.path / "events.jsonl")
    source = open_source(config)
    ledger = read_ledger(run.ledger(config))
    ledger = replace(ledger, in_checkpoints=stored_in_checkpoints(run, ledger, lists))
    sizes = GroupSizes(source, config.learner.group_size)

    def task_of(index: int) -> tuple[str, int]:
        row = ledger.added.get(index)
        task = readable(lambda: source.task(index), f"task {index}") if row is None else added_task(index, row.task)
        return str(task["id"]), sizes.of(index)

    curriculum = open_curriculum(config, source)
    bounds = Bounds.of(config)
    configs = (*run.earlier_configs(), config)
    rules = tuple(Bounds.of(each) for each in configs)
    settings = tuple(resuming.settings(each) for each in configs)
    return Evidence(ledger, acks, lists, task_of, curriculum, payloads.read, bounds, rules, published, settings)


def stored_in_checkpoints(
    run: RunFolder, ledger: LedgerRows, lists: Sequence[LearnerList]
) -> frozenset[tuple[int, int, int, str]]:
    """What the ledgers in the checkpoints hold, of a run whose own ledger was restored from one; else nothing is read.

    A checkpoint behind the one that was restored was completed too late: what its ledger holds was lost as well.
    """
    found: set[tuple[int, int, int, str]] = set()
    for each in lists if ledger.restored_at(-1) is not None else ():
        at = ledger.restored_at(each.branch)
        if at is None or each.batch <= at[0]:
            found |= stored(run.checkpoints / each.checkpoint)
    return frozenset(found)


def read_acks(path: Path) -> AckLines:
    """An actor's log. An unfinished last line is not read: a power cut ended it, or it is being written."""
    acks: list[Ack] = []
    missing: list[int] = []
    unreadable: list[int] = []
    expected = 0
    for number, line in enumerate(path.read_text(errors="replace").split("\n")[:-1], 1):
        try:
            fields = json.loads(line)
            n = int(fields.pop("n"))
            acks.append(Ack(**fields))
        except (ValueError, TypeError, KeyError, AttributeError):
            unreadable.append(number)
            n = expected
        missing.extend(range(expected, n))
        expected = n + 1
    return AckLines(path.stem, acks, missing, unreadable)


def read_publications(path: Path) -> tuple[Publication, ...]:
    """Every report, as the launcher wrote it; messages can be lost, so that some may be missing.

    A learner that resumes may publish a version again, with the same digest: with another one a branch begins.
    """
    found: dict[Publication, None] = {}
    for line in path.read_text(errors="replace").split("\n")[:-1] if path.exists() else ():
        try:
            event = json.loads(line)
            if event["kind"] == "published" and event["role"] == "learner":
                found[Publication(int(event["branch"]), int(event["step"]), str(event["digest"]))] = None
        except (ValueError, TypeError, KeyError):
            continue  # a killed launcher leaves part of a line
    return tuple(found)


def _list(path: Path) -> LearnerList | None:
    try:
        state, done = read_list(path)
        changed = tuple(changed_files(path))
    except RunError:
        if not path.exists():
            return None  # a live learner removed it
        raise
    # A live learner may have removed it meanwhile.
    return LearnerList(path.name, state.branch, state.batch, done, changed if path.exists() else ())
