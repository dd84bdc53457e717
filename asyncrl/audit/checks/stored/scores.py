"""Scores of a teacher on servers: whose they are, who brought them, and which a batch took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.audit.ledger import GroupRow, LedgerRows
from asyncrl.audit.scorer_logs import ScoredLine, ScorerLines
from asyncrl.audit.table import Check, apply
from asyncrl.buffer.ledger.storage.payloads import checksum
from asyncrl.wire import WireError
from asyncrl.wire.teacher_scores import GroupScores, from_record

ENDINGS = (None, "scored", "late", "lapsed", "returned", "revoked", "lost")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """Where the scores of a group lie."""

    segment: int
    start: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Told:
    """The witnesses beside the ledger."""

    scored: bool
    """The configuration has a teacher on servers."""
    payload: Callable[[Any], bytes]
    logs: Mapping[str, ScorerLines]
    teacher: str = ""
    """Digest in teacher.json; empty: there is none."""
    trained: Sequence[str] = ()
    """Digests of teachers in the learner's lists."""


def scores(ledger: LedgerRows, told: Told) -> Iterator[str]:
    return apply(SCORES, ledger, told)


def batches_take_scored_groups(ledger: LedgerRows, told: Told) -> Iterator[str]:
    """With a teacher on servers every batch names the scores of each of its groups, which are there; else none does."""
    stored = {row["grp"]: row["digest"] for row in ledger.tables["scores"]}
    lost = {row["grp"] for row in ledger.tables["scorings"] if row["ended"] == "lost"}
    used: defaultdict[int, dict[int, str]] = defaultdict(dict)
    for row in ledger.tables["score_uses"]:
        used[row["serial"]][row["grp"]] = row["digest"]
    for batch in ledger.batches:
        taken = used.pop(batch.serial, {})
        if sorted(taken) != (sorted(batch.groups) if told.scored else []):
            held = f"batch {batch.b} of branch {batch.branch} holds {sorted(batch.groups)}"
            yield f"{held}, with scores of {sorted(taken)}"
        others = {n: digest for n, digest in taken.items() if stored.get(n) != digest and n not in lost}
        yield from (
            f"batch {batch.b} took group {n} with scores {d}, it has {stored.get(n)}" for n, d in others.items()
        )
    if used:
        yield f"scores are named by {sorted(used)}, which are no batches"


def scores_are_of_complete_groups(ledger: LedgerRows, _: Told) -> Iterator[str]:
    """Scores are of a complete group that no filter dropped, brought under a lease of that scorer."""
    leases = {(row["grp"], row["attempt"]): row for row in ledger.tables["scorings"]}
    for row in ledger.tables["scores"]:
        group, lease = ledger.groups.get(row["grp"]), leases.get((row["grp"], row["attempt"]))
        if group is None or len(ledger.members.get(group.number, ())) != group.size:
            yield f"group {row['grp']} has scores and is not complete"
        elif group.reason == "filtered":
            yield f"group {row['grp']} was dropped by a filter, which judges before scoring, and has scores"
        if lease is None or (lease["scorer"], lease["ended"]) != (row["scorer"], "scored"):
            brought = f"attempt {row['attempt']} of {row['scorer']}"
            yield f"group {row['grp']} has scores of {brought}, which no lease says"


def leases_of_groups_end_once(ledger: LedgerRows, _: Told) -> Iterator[str]:
    """Leases of groups are numbered without gaps and end in a known way; one brought the scores that are there."""
    rows: list[Row] = ledger.tables["scorings"]
    stored = {(row["grp"], row["attempt"]) for row in ledger.tables["scores"]}
    if sorted(row["serial"] for row in rows) != list(range(len(rows))):
        yield f"the {len(rows)} leases of groups are not numbered 0 to {len(rows) - 1} in the order of issue"
    of_group: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows:
        of_group[row["grp"]].append(row)
        yield from _wrong_ending(row, (row["grp"], row["attempt"]) in stored)
    for number, leases in of_group.items():
        if number not in ledger.groups:
            yield f"group {number} was leased to a scorer and is no group of the ledger"
        yield from _wrong_order(number, sorted(leases, key=lambda row: int(row["attempt"])))


def _wrong_ending(row: Row, brought: bool) -> Iterator[str]:
    name = f"lease {row['attempt']} of group {row['grp']}"
    if row["ended"] not in ENDINGS or (row["ended"] is None) != (row["ended_at"] is None):
        yield f"{name} ended as {row['ended']!r} at {row['ended_at']}"
    if (row["ended"] == "scored") != brought:
        yield f"{name} ended as {row['ended']!r}, and it brought {'' if brought else 'no '}scores"


def _wrong_order(number: int, leases: list[Row]) -> Iterator[str]:
    """`leases` of one group, by attempt."""
    serials = [row["serial"] for row in leases]
    if [row["attempt"] for row in leases] != list(range(len(leases))):
        yield f"the leases of group {number} are not numbered without gaps"
    if serials != sorted(serials):
        yield f"the leases of group {number} were not issued in their order"
    if any(row["ended"] is None for row in leases[:-1]):
        yield f"group {number} was leased again before its lease ended"


def one_teacher_gave_all_scores(ledger: LedgerRows, told: Told) -> Iterator[str]:
    """All scores are of one teacher: that of the ledger, of teacher.json, and of the learner's lists."""
    rows = ledger.tables["scores"]
    named = {row["teacher"] for row in rows} | ({told.teacher} if told.teacher and told.scored else set())
    named |= {digest for digest in told.trained if told.scored}
    named |= {ledger.teacher} if ledger.teacher else set()
    if len(named) > 1:
        yield f"scores are of {len(named)} teachers: {', '.join(sorted(named))}"
    if rows and not ledger.teacher:
        yield "the ledger has scores and names no teacher"


def scores_are_as_recorded(ledger: LedgerRows, told: Told) -> Iterator[str]:
    """The stored scores of every group whose payload is kept are those of the ledger's row, of its trajectories."""
    for row in ledger.tables["scores"]:
        group = ledger.groups.get(row["grp"])
        if group is None or not group.payload:
            continue
        try:
            found = read_scores(row, told.payload)
        except (WireError, FileNotFoundError) as error:
            yield f"the scores of group {row['grp']} cannot be read: {error}"
            continue
        for what, (stored, recorded) in _compared(row, group, found, ledger).items():
            if stored != recorded:
                yield f"the scores of group {row['grp']} have {what} {stored}, the ledger says {recorded}"


def _compared(row: Row, group: GroupRow, found: GroupScores, ledger: LedgerRows) -> dict[str, tuple[Any, Any]]:
    """What is stored and what is recorded, by name."""
    members = ledger.members.get(group.number, ())
    line = found.logged and (found.logged.line, found.logged.digest)
    return {
        "group": ((found.branch, found.group), (group.branch, group.number)),
        "attempt": (found.attempt, row["attempt"]),
        "scorer": (found.scorer, row["scorer"]),
        "teacher": (found.teacher, row["teacher"]),
        "digest": (found.digest(), row["digest"]),
        "trajectories": (found.trajectories, tuple(m.digest for m in members)),
        "tokens": ([len(each) for each in found.scores], [m.policy_tokens for m in members]),
        "line": (line, row["head"] and (row["line"], row["head"])),
    }


def scores_were_announced(ledger: LedgerRows, told: Told) -> Iterator[str]:
    """All scores are those that their scorer announced; its log, as far as the ledger knows it, is what it was then."""
    for row in ledger.tables["scores"]:
        log = told.logs.get(row["scorer"], ScorerLines(row["scorer"]))
        put = log.puts.get(row["line"]) if row["line"] is not None else None
        if put is None or log.heads.get(row["line"]) != row["head"]:
            yield f"line {row['line']} of scores/{row['scorer']}.jsonl is not what it was when group {row['grp']} came"
        elif (put.group, put.attempt, put.digest, put.teacher) != tuple(
            row[name] for name in ("grp", "attempt", "digest", "teacher")
        ):
            yield f"{row['scorer']} announced other scores of group {row['grp']} than the ledger has"
        elif put.trajectories != tuple(m.digest for m in ledger.members.get(row["grp"], ())):
            yield f"{row['scorer']} scored other trajectories of group {row['grp']} than the ledger has"
    for row in ledger.tables["score_logs"]:
        log = told.logs.get(row["scorer"], ScorerLines(row["scorer"]))
        if log.heads.get(row["line"]) != row["head"]:
            yield f"scores/{row['scorer']}.jsonl up to line {row['line']} is not what the scorer told the buffer of"


def acknowledged_scores_are_stored(ledger: LedgerRows, told: Told) -> Iterator[str]:
    """What a scorer was told is stored is in the ledger, or was lost with its host; no line of its log is missing."""
    stored = {(row["grp"], row["attempt"]): row["digest"] for row in ledger.tables["scores"]}
    lost = {(row["grp"], row["attempt"]) for row in ledger.tables["scorings"] if row["ended"] == "lost"}
    for log in told.logs.values():
        yield from (f"scores/{log.scorer}.jsonl {what}" for what in log.damaged)
        for line in log.stored:
            key = line.group, line.attempt
            if stored.get(key) != line.digest and key not in lost and not _lost_with_host(ledger, line):
                yield f"{log.scorer} was told that the scores of group {line.group} are stored, the ledger lacks them"


def _lost_with_host(ledger: LedgerRows, line: ScoredLine) -> bool:
    """Whether the scores were stored before the buffer's host was lost, and by no checkpoint that outlived it."""
    covered = (line.group, line.attempt, line.digest) in ledger.scores_in_checkpoints
    return ledger.restored_at(line.branch) is not None and not covered


def read_scores(row: Row, read: Callable[[Any], bytes]) -> GroupScores:
    """Raises WireError, FileNotFoundError."""
    record = read(ScoreRow(row["segment"], row["start"], row["bytes"]))
    if len(record) != row["bytes"] or checksum(record) != row["checksum"]:
        raise WireError(f"the bytes in segment {row['segment']} are missing or were changed")
    return from_record(record)


SCORES: tuple[Check, ...] = (
    batches_take_scored_groups,
    scores_are_of_complete_groups,
    leases_of_groups_end_once,
    one_teacher_gave_all_scores,
    scores_are_as_recorded,
    scores_were_announced,
    acknowledged_scores_are_stored,
)
