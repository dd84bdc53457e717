"""The witnesses of a run, each read from its own place, so that a mistake of one cannot have altered another.

the data seed          which task every draw must have been        buffer/tasks/sources.py, the task source
                       which demonstration                         data/demonstrations, the files
the actors' logs       what each put, and was told is stored       acks/<actor>.jsonl
the scorers' logs      the same of scores                          scores/<scorer>.jsonl
the learner's lists    which groups, of which digest, it trained   checkpoints/*/batches.jsonl
the learner's reports  what it published                           events.jsonl
the payloads           what was stored, byte by byte               buffer/payloads/*.segment
the ledger             the account that all of them must support   buffer/ledger.sqlite
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from asyncrl.audit.actor_logs import AckLines, read_logs
from asyncrl.audit.chain import read_head
from asyncrl.audit.ledger import BatchRow, LedgerRows
from asyncrl.audit.payloads import PayloadFiles, ReadPayload
from asyncrl.audit.reading import read_ledger
from asyncrl.audit.scorer_logs import ScorerLines, read_score_logs
from asyncrl.buffer.bounds.automatic import Auto, in_force
from asyncrl.buffer.bounds.slots import SlotLimits
from asyncrl.buffer.ledger.witnessed import read_witnessed
from asyncrl.buffer.replaying import Replaying
from asyncrl.buffer.selection import FILTERS, Filter
from asyncrl.buffer.tasks.added_tasks import task_of as added_task
from asyncrl.buffer.tasks.sources import open_curriculum, open_held_out, open_source
from asyncrl.config import Config, resuming
from asyncrl.config.choosing import Choosing
from asyncrl.config.demonstrations import demonstrations_per_step, groups_per_step
from asyncrl.config.held_out import HeldOutSet, held_out_sets
from asyncrl.config.teacher import scored_by_servers
from asyncrl.data.base import Curriculum, TaskSource
from asyncrl.data.checked import readable
from asyncrl.data.demonstrations import Demonstrations, open_demonstrations
from asyncrl.data.group_sizes import GroupSizes
from asyncrl.errors import ConfigError, RunError
from asyncrl.learner.checkpoints.checkpoints import Done, changed_files, complete, read_list
from asyncrl.learner.distillation.identity import recorded
from asyncrl.plugins import resolve
from asyncrl.run_folder import RunFolder


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
class SnapshotHead:
    """The last commit in a checkpoint's copy of the ledger."""

    checkpoint: str
    branch: int
    batch: int
    """The next batch of a learner that resumes from it."""
    seq: int
    head: str
    batches: int
    """That have an outcome there."""


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
    eval_sets: tuple[HeldOutSet, ...] = ()
    eval_every: int = 0
    replay: Replaying | None = None
    data_seed: int = 0
    demonstrations_per_step: int = 0
    choosing: Choosing = field(default_factory=Choosing)
    auto: Auto | None = None
    """`buffer.max_staleness: auto`; then `max_staleness` is the limit."""
    tuning: SlotLimits | None = None
    """`launch.tuning: auto`"""

    def after(self, batch: BatchRow | None) -> int:
        """The bound on staleness after this batch, the last one of its line; None: before the first."""
        if self.auto is None:
            return self.max_staleness
        return batch.bound if batch is not None and batch.outcome is None else in_force(self.auto, batch).bound

    durable: bool = False
    """`buffer.turns` is on."""
    turns_auto_s: float | None = None
    """`buffer.turns_auto_s`, where it is auto."""
    mixed: bool = False
    """`env.name` is mix."""
    scored: bool = False
    """Groups need the scores of a teacher on servers."""

    @classmethod
    def of(cls, c: Config) -> Bounds:
        """Raises ConfigError for an unknown filter or priority."""
        b = c.buffer
        try:
            filters = tuple(resolve(name, FILTERS, "buffer.filters") for name in b.filters)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return cls(
            groups_per_step(c),
            b.max_uses,
            b.most_staleness,
            b.over_age,
            b.mask_min_kept,
            requeue=b.requeue,
            filters=filters,
            filter_max_ratio=b.filter_max_ratio,
            starved_ends=b.on_starved == "end",
            env_retries=c.env.retries,
            group_scored=bool(c.env.group_score),
            eval_sets=held_out_sets(c),
            eval_every=c.eval.every,
            replay=Replaying.of(c),
            data_seed=c.data.seed,
            demonstrations_per_step=demonstrations_per_step(c),
            choosing=Choosing.of(c),
            auto=Auto.of(c),
            tuning=SlotLimits.of(c),
            durable=b.turns == "on",
            turns_auto_s=b.turns_auto_s if b.turns == "auto" else None,
            mixed=c.env.name == "mix",
            scored=scored_by_servers(c),
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
    payload: ReadPayload
    bounds: Bounds
    rules: tuple[Bounds, ...]
    """Those of every configuration that the run had, the latest last."""
    published: tuple[Publication, ...] = ()
    settings: tuple[Mapping[str, Any], ...] = ({},)
    """What decided the result of a training step under every configuration that the run had."""
    snapshots: tuple[SnapshotHead, ...] = ()
    """One for each checkpoint with a copy of the ledger."""
    held_out: Mapping[str, int] = field(default_factory=dict)
    """How many held-out tasks the source of each held-out set has, by its name."""
    demonstrations: Demonstrations | None = None
    """Those of the files, in the order that the data seed gives."""
    scorers: Mapping[str, ScorerLines] = field(default_factory=dict)
    """The scorers' logs."""
    teacher: str = ""
    """Digest of the teacher in teacher.json."""
    completed: tuple[str, ...] = ()
    """Names of the checkpoints that the learner reported as complete, in that order."""


def gather(run: RunFolder, config: Config, payloads: PayloadFiles) -> Evidence:
    """Read every witness. Raises RunError or ConfigError if one cannot be read at all.

    The ledger is read behind what follows it: on a live run it then holds everything that the others recorded. What
    actors announce is read behind the ledger.
    """
    scored = read_score_logs(run.score_logs)
    told, completed = read_logs(run.acks), read_completed(run.path / "events.jsonl")
    lists = [done for path in complete(run.checkpoints) if (done := _list(path)) is not None]
    snapshots = tuple(head for path in complete(run.checkpoints) if (head := _head(path)) is not None)
    published = read_publications(run.path / "events.jsonl")
    source = open_source(config)
    ledger = read_ledger(run.ledger(config))
    # Again: what is announced is written before the ledger has it.
    acks = [told.get(actor, AckLines(actor, [], [], [])).until(log) for actor, log in read_logs(run.acks).items()]
    ledger = with_checkpoints(run, ledger, lists)
    sizes = GroupSizes(source, config.learner.group_size)

    def task_of(index: int) -> tuple[str, int]:
        row = ledger.added.get(index)
        task = readable(lambda: source.task(index), f"task {index}") if row is None else added_task(index, row.task)
        return str(task["id"]), sizes.of(index)

    curriculum = open_curriculum(config, source)
    bounds = Bounds.of(config)
    configs = (*run.earlier_configs(), config)
    return Evidence(
        ledger,
        acks,
        lists,
        task_of,
        curriculum,
        payloads.read,
        bounds,
        rules=tuple(Bounds.of(each) for each in configs),
        published=published,
        settings=tuple(resuming.settings(each) for each in configs),
        snapshots=snapshots,
        held_out=_held_out(configs, source),
        demonstrations=open_demonstrations(config),
        scorers={
            name: replace(log, stored=scored[name].stored if name in scored else [])
            for name, log in read_score_logs(run.score_logs).items()
        },
        teacher=recorded(run.teacher),
        completed=completed,
    )


def _held_out(configs: Sequence[Config], source: TaskSource) -> dict[str, int]:
    """By set of any configuration that the run had, the latest counting. A set of an earlier one whose source is gone
    is not known."""
    sizes: dict[str, int] = {}
    for config in configs:
        try:
            own = open_held_out(config)
        except ConfigError:
            if config is configs[-1]:
                raise
            continue
        sizes |= {each.name: own.get(each.name, source).held_out_size for each in held_out_sets(config)}
    return sizes


def with_checkpoints(run: RunFolder, ledger: LedgerRows, lists: Sequence[LearnerList]) -> LedgerRows:
    """The ledger with the trajectories, recorded turns and scores that the ledgers of the checkpoints hold, of a run
    whose own ledger was restored from one; else nothing is read.

    A checkpoint behind the one that was restored was completed too late: what its ledger holds was lost as well.
    """
    trajectories: set[Any] = set()
    turns: set[Any] = set()
    scores: set[Any] = set()
    for each in lists if ledger.restored_at(-1) is not None else ():
        at = ledger.restored_at(each.branch)
        if at is None or each.batch <= at[0]:
            held = read_witnessed(run.checkpoints / each.checkpoint)
            trajectories.update(held.trajectories)
            turns.update(held.turns)
            scores.update(held.scores)
    return replace(
        ledger,
        in_checkpoints=frozenset(trajectories),
        turns_in_checkpoints=frozenset(turns),
        scores_in_checkpoints=frozenset(scores),
    )


def read_completed(path: Path) -> tuple[str, ...]:
    """Names of the checkpoints that the learner reported as complete, in that order."""
    named = (str(event["path"]) for event in _events(path) if event.get("kind") == "checkpoint" and "path" in event)
    return tuple(name.rpartition("/")[2] for name in named)


def read_publications(path: Path) -> tuple[Publication, ...]:
    """Every report, as the launcher wrote it; messages can be lost, so that some may be missing.

    A learner that resumes may publish a version again, with the same digest: with another one a branch begins.
    """
    found: dict[Publication, None] = {}
    for event in _events(path):
        try:
            if event["kind"] == "published" and event["role"] == "learner":
                found[Publication(int(event["branch"]), int(event["step"]), str(event["digest"]))] = None
        except (ValueError, TypeError, KeyError):
            continue
    return tuple(found)


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """What the launcher wrote."""
    for line in path.read_text(errors="replace").split("\n")[:-1] if path.exists() else ():
        with suppress(ValueError):  # a killed launcher leaves part of a line
            event = json.loads(line)
            if isinstance(event, dict):
                yield event


def _head(path: Path) -> SnapshotHead | None:
    """None: a checkpoint without the buffer's part, or one that a live learner removed."""
    copy = path / "buffer" / "ledger.sqlite"
    try:
        if not copy.is_file():
            return None
        state = read_list(path)[0]
        return SnapshotHead(path.name, state.branch, state.batch, *read_head(copy))
    except RunError:
        if path.exists():
            raise
        return None


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
