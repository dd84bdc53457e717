"""The buffer's ledger as plain rows, read independently of the code that wrote it, without disturbing a writer.

It is one read transaction: later writes of a live buffer are not seen, and the buffer does not wait.
"""

from __future__ import annotations

import sqlite3
import struct
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from asyncrl.audit.chain import ChainRows, read_chain
from asyncrl.buffer.ledger.records import BOUND, NOTHING, Decision, Draw, Drawn, Measures, of_bound
from asyncrl.buffer.ledger.storage import schema
from asyncrl.data.added_tasks import ADDED
from asyncrl.errors import RunError

TABLES = (
    "attempts", "batches", "checkpoints", "eval_measures", "eval_results", "evals", "incarnations",
    "lengths", "logs", "prefixes", "published", "replays", "retired", "score_logs",
    "score_uses", "scores", "scorings", "stops", "turns", "uses",
)  # fmt: skip
"""Tables that are also read as they are."""


@dataclass(frozen=True, slots=True)
class BranchRow:
    branch: int
    parent: int | None
    fork_batch: int
    fork_version: int
    why: str

    @property
    def restored(self) -> bool:
        """Whether the ledger came from a checkpoint: later records were lost with their host."""
        return self.why.startswith("the ledger was restored")


@dataclass(frozen=True, slots=True)
class GroupRow:
    number: int
    branch: int
    draw: int
    task: int
    curriculum: int
    measured: int | None
    replaces: int | None
    task_id: str
    size: int
    state: str
    reason: str | None
    weight: float
    uses: int
    ended_batch: int | None
    filling: int | None
    put_back: bool
    payload: bool
    durable: bool = False
    """Its tickets' turns are recorded."""
    task_env: str = ""
    """Of a mix: the environment that its task names."""
    lengths: int | None = None
    """How many lengths of episodes decided that."""


@dataclass(frozen=True, slots=True)
class AttemptRow:
    group: int
    index: int
    attempt: int
    actor: str
    branch: int
    """On which it was lent."""
    min_version: int
    ended: str | None
    issued_at: float
    """This and every other time: the buffer's clock, in seconds since the epoch; metadata, which no check uses."""
    ended_at: float | None
    serial: int
    """0, 1, 2 ... in the order of issue."""


@dataclass(frozen=True, slots=True)
class TrajectoryRow:
    group: int
    index: int
    attempt: int
    actor: str
    digest: str
    segment: int
    start: int
    bytes: int
    checksum: int
    tokens: int
    policy_tokens: int
    turns: int
    reward: float
    env: str
    stop_reason: str
    received_at: float
    line: int | None
    """Its number in the actor's log."""
    head: str | None
    branch: int | None
    """On which its attempt was lent; None: its attempt is missing."""
    versions: tuple[tuple[int, int], ...]
    """(policy version, policy tokens of it), oldest first"""

    @property
    def oldest(self) -> int:
        return min((version for version, _ in self.versions), default=-1)

    @property
    def newest(self) -> int:
        return max((version for version, _ in self.versions), default=-1)

    def tokens_since(self, version: int) -> int:
        return sum(count for v, count in self.versions if v >= version)


@dataclass(frozen=True, slots=True)
class PrefixRow:
    group: int
    index: int
    attempt: int
    """The attempt that handed it back."""
    tokens: int
    """Number of tokens, with the prompt."""
    digest: str
    ended: str | None


@dataclass(frozen=True, slots=True)
class BatchRow:
    serial: int
    b: int
    branch: int
    version: int
    outcome: str | None
    released: bool
    fixed_at: float
    finished_at: float | None
    groups: tuple[int, ...]
    """Group numbers, in training order."""
    replay: Draw = NOTHING
    """Used groups beside the new ones."""
    bound: int = 0
    """The most versions that a token with loss may be old."""
    measures: Measures | None = None
    decision: Decision | None = None
    """Of the bound after it."""
    damaged: str = ""
    """What cannot be read of measures and decision, which are then None."""

    @property
    def version_after(self) -> int:
        return self.version + (self.outcome == "applied")


@dataclass(frozen=True, slots=True)
class DemonstrationRow:
    place: int
    draw: int
    row: int
    """Of the files."""
    digest: str


@dataclass(frozen=True, slots=True)
class CurriculumRow:
    serial: int
    batch: int
    version: int
    state: str
    released: bool


@dataclass(frozen=True, slots=True)
class AddedRow:
    batch: int
    task: str
    draw: int | None
    released: bool


@dataclass(frozen=True)
class LedgerRows:
    branches: dict[int, BranchRow]
    groups: dict[int, GroupRow]
    """Groups by number, in issue order."""
    attempts: dict[tuple[int, int], list[AttemptRow]]
    """Attempts by (group, index), in order."""
    trajectories: dict[tuple[int, int], TrajectoryRow]
    batches: list[BatchRow]
    """All batches that were ever fixed, in order."""
    published: dict[tuple[int, int], str]
    """Digest of the weights by (branch, version)."""
    counters: dict[tuple[int, str], int]
    """Counters by (branch, name)."""
    next_draw: int
    curriculum: dict[int, CurriculumRow]
    """States of the curriculum by serial, in order."""
    added: dict[int, AddedRow]
    """Tasks added by data.on_step_end, by index."""
    prefixes: list[PrefixRow]
    """Prefixes that interrupted attempts handed back."""
    demonstrations: dict[int, list[DemonstrationRow]] = field(default_factory=dict)
    """Those that a batch takes, by its serial, in order."""
    demonstrations_digest: str | None = None
    """Of all rows of data.demonstrations when the run began."""
    teacher: str = ""
    """Digest of the teacher on servers whose scores it holds; empty: none."""
    restored: bool = False
    """Whether it was copied from a checkpoint, and no learner has started since, which would open a new branch."""

    in_checkpoints: frozenset[tuple[int, int, int, str]] = frozenset()
    """(branch, group, index, digest) of every trajectory in the ledger of a checkpoint at hand, if the run's own ledger
    was ever restored from one: these cannot have been lost with a host."""

    turns_in_checkpoints: frozenset[tuple[int, int, int, int, int, str, str | None]] = frozenset()
    """The same of recorded turns: as `Witnessed.turns`."""

    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Whole rows of `TABLES`, in the order of their keys."""
    chain: ChainRows | None = None
    """None: the rows were not read from a ledger."""

    @cached_property
    def line(self) -> list[BatchRow]:
        """The batches that led to the learner's weights."""
        return sorted((batch for batch in self.batches if not batch.released), key=lambda batch: batch.b)

    @cached_property
    def members(self) -> dict[int, list[TrajectoryRow]]:
        """Stored trajectories of each group, by index."""
        members: defaultdict[int, list[TrajectoryRow]] = defaultdict(list)
        for key in sorted(self.trajectories):
            members[key[0]].append(self.trajectories[key])
        return members

    @cached_property
    def scores_used(self) -> dict[tuple[int, int], tuple[str, ...]]:
        """Digest of the scores with which a batch took a group, by serial and group."""
        return {(row["serial"], row["grp"]): (row["digest"],) for row in self.tables["score_uses"]}

    @cached_property
    def _by_place(self) -> dict[tuple[int, int], BatchRow]:
        return {(batch.branch, batch.b): batch for batch in self.batches}

    @cached_property
    def turn_of(self) -> dict[tuple[int, int, int, int, str], dict[str, Any]]:
        """Recorded turns by group, index, attempt, number and form."""
        return {tuple(row[n] for n in ("grp", "idx", "attempt", "number", "form")): row for row in self.tables["turns"]}

    @cached_property
    def seconds_of(self) -> dict[tuple[int, int, int], float]:
        """How long an attempt took, by group, index and attempt, where the ledger has that."""
        return {(row["grp"], row["idx"], row["attempt"]): row["seconds"] for row in self.tables["lengths"]}

    def fixed_on(self, branch: int, b: int) -> BatchRow | None:
        """Batch b if it was fixed on this very branch."""
        return self._by_place.get((branch, b))

    def batch_of(self, branch: int, b: int) -> BatchRow | None:
        """Batch b as a learner on `branch` saw it: of this branch, or of an ancestor."""
        at = self.branches.get(branch)
        while at is not None and at.fork_batch > b and at.parent is not None:
            at = self.branches.get(at.parent) if at.parent < at.branch else None  # else it would have no end
        return None if at is None else self._by_place.get((at.branch, b))

    def trained_by(self, serial: int) -> dict[str, Any] | None:
        """The start of the learner that finished this batch first."""
        batch = next(row for row in self.tables["batches"] if row["serial"] == serial)
        later = (row for row in self.tables["incarnations"] if row["incarnation"] >= batch["incarnation"])
        return next((row for row in later if row["next_batch"] > batch["b"]), None)

    def name(self, number: int, index: int) -> str:
        """Name of a trajectory, with the branch of its group."""
        group = self.groups.get(number)
        return f"{'?' if group is None else group.branch}.{number}.{index}"

    def restored_at(self, branch: int) -> tuple[int, int] | None:
        """Batch and version from which on the records of `branch` were lost with their host; None: none were."""
        points = [(b.fork_batch, b.fork_version) for b in self.branches.values() if b.restored and b.branch > branch]
        if self.restored:  # as of the checkpoint: where its learner stood
            points += [(row["next_batch"], row["version"]) for row in self.tables["incarnations"][-1:]]
        return min(points, default=None)


def read_ledger(folder: Path) -> LedgerRows:
    """The ledger of a finished, a killed or a live run. Raises RunError if it is missing or cannot be read."""
    path = folder / "ledger.sqlite"
    if not path.is_file():
        raise RunError(f"{folder} holds no ledger (ledger.sqlite): give a run folder whose buffer has started.")
    # Without a write-ahead log there is no writer, and reading needs no write.
    immutable = "" if path.with_name("ledger.sqlite-wal").exists() else "&immutable=1"
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro{immutable}", uri=True)) as db:
            db.row_factory = sqlite3.Row
            db.execute("BEGIN")
            return _rows(db)
    except (sqlite3.Error, struct.error, ValueError, TypeError) as error:
        raise RunError(
            f"{path} cannot be read: {error}. If its folder is read-only, audit a copy of the run folder; a damaged "
            "ledger is restored from the newest checkpoint's buffer/."
        ) from error


def _rows(db: sqlite3.Connection) -> LedgerRows:
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version != schema.VERSION:
        raise RunError(f"the ledger of this run cannot be read: {schema.refusal(version)}")

    def read(sql: str) -> list[sqlite3.Row]:
        return db.execute(sql).fetchall()

    shown: defaultdict[int, list[DemonstrationRow]] = defaultdict(list)
    for serial, *rest in read("SELECT serial, place, draw, line, digest FROM demonstrations ORDER BY serial, place"):
        shown[serial].append(DemonstrationRow(*rest))
    taught_by = read("SELECT value FROM kv WHERE key = 'teacher'")
    began_with = read("SELECT value FROM kv WHERE key = 'demonstrations'")
    attempts: defaultdict[tuple[int, int], list[AttemptRow]] = defaultdict(list)
    for row in read(
        'SELECT grp AS "group", idx AS "index", attempt, actor, branch, min_version, ended, issued_at, ended_at, '
        "serial FROM attempts ORDER BY 1, 2, 3"
    ):
        attempts[row["group"], row["index"]].append(AttemptRow(**dict(row)))
    next_draw = read("SELECT value FROM kv WHERE key = 'next_draw'")
    return LedgerRows(
        branches={
            row["branch"]: BranchRow(**dict(row))
            for row in read("SELECT branch, parent, fork_batch, fork_version, why FROM branches ORDER BY branch")
        },
        groups={
            row["number"]: GroupRow(**_with_bools(row, "put_back", "payload", "durable"))
            for row in read(
                "SELECT number, branch, draw, task, curriculum, measured, replaces, task_id, size, state, reason, "
                "weight, uses, ended_batch, filling, put_back, payload, durable, task_env, lengths "
                "FROM groups ORDER BY number"
            )
        },
        attempts=dict(attempts),
        trajectories={
            (row["group"], row["index"]): TrajectoryRow(**(dict(row) | {"versions": _pairs(row["versions"])}))
            for row in read(
                'SELECT grp AS "group", idx AS "index", attempt, t.actor, digest, segment, start, bytes, checksum, '
                "versions, tokens, policy_tokens, turns, reward, env, stop_reason, received_at, line, head, branch "
                "FROM trajectories t LEFT JOIN attempts USING (grp, idx, attempt)"
            )
        },
        batches=_batches(read),
        published={(b, v): digest for b, v, digest in read("SELECT branch, version, digest FROM published")},
        counters={(branch, name): value for branch, name, value in read("SELECT branch, name, value FROM counters")},
        next_draw=int(next_draw[0][0]) if next_draw else 0,
        added={
            ADDED + row["serial"]: AddedRow(row["batch"], row["task"], row["draw"], bool(row["released"]))
            for row in read("SELECT serial, batch, task, draw, released FROM added ORDER BY serial")
        },
        curriculum={
            row["serial"]: CurriculumRow(**_with_bools(row, "released"))
            for row in read("SELECT serial, batch, version, state, released FROM curriculum ORDER BY serial")
        },
        prefixes=[
            PrefixRow(**dict(row))
            for row in read('SELECT grp AS "group", idx AS "index", attempt, tokens, digest, ended FROM prefixes')
        ],
        demonstrations=dict(shown),
        demonstrations_digest=str(began_with[0][0]) if began_with else None,
        teacher=str(taught_by[0][0]) if taught_by else "",
        restored=bool(read("SELECT 1 FROM kv WHERE key = 'restored'")),
        tables={name: [dict(row) for row in read(f"SELECT * FROM {name} ORDER BY 1, 2, 3")] for name in TABLES},
        chain=read_chain(db),
    )


def _batches(read: Callable[[str], list[sqlite3.Row]]) -> list[BatchRow]:
    uses: defaultdict[int, list[int]] = defaultdict(list)
    for serial, group in read("SELECT serial, grp FROM uses ORDER BY serial, place"):
        uses[serial].append(group)
    replays: defaultdict[int, list[Drawn]] = defaultdict(list)
    for serial, *drawn in read("SELECT serial, grp, chance, weight FROM replays ORDER BY serial, grp"):
        replays[serial].append(Drawn(*drawn))
    candidates = {serial: n for serial, n in read("SELECT serial, candidates FROM batches")}
    decided = {serial: _of_bound(*about) for serial, *about in read(f"SELECT serial, {BOUND} FROM batches")}
    rows = read("SELECT serial, b, branch, version, outcome, released, fixed_at, finished_at FROM batches ORDER BY 1")
    batches = []
    for row in rows:
        serial = row["serial"]
        bound, measures, decision, damaged = decided[serial]
        batches.append(
            BatchRow(
                **_with_bools(row, "released"),
                groups=tuple(uses[serial]),
                replay=Draw(candidates[serial], tuple(replays[serial])),
                bound=bound,
                measures=measures,
                decision=decision,
                damaged=damaged,
            )
        )
    return batches


def _of_bound(bound: int, *about: Any) -> tuple[int, Measures | None, Decision | None, str]:
    try:
        return *of_bound(bound, *about), ""
    except ValueError as error:
        return bound, None, None, str(error)


def _with_bools(row: sqlite3.Row, *names: str) -> dict[str, Any]:
    return dict(row) | {name: bool(row[name]) for name in names}


def _pairs(packed: bytes) -> tuple[tuple[int, int], ...]:
    numbers = iter(struct.unpack(f"<{len(packed) // 8}q", packed))
    return tuple(zip(numbers, numbers, strict=True))
