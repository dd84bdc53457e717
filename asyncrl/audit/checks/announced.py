"""What the ledger has of trajectories and evaluations is what their actors announced before they sent it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from asyncrl.audit.actor_logs import AckLines, PutLine
from asyncrl.audit.ledger import LedgerRows, TrajectoryRow
from asyncrl.audit.table import Check, apply
from asyncrl.buffer.evaluations.places import place_of

Logs = Sequence[AckLines]


def announced(ledger: LedgerRows, logs: Logs) -> Iterator[str]:
    return apply(ANNOUNCED, ledger, logs)


def trajectories_have_lines(ledger: LedgerRows, logs: Logs) -> Iterator[str]:
    """Every trajectory is the one that its actor announced, at its line, with that log up to there."""
    by_actor = {log.actor: log for log in logs}
    for key, row in ledger.trajectories.items():
        if problem := _of_line(row, by_actor.get(row.actor), ledger):
            yield f"trajectory {ledger.name(*key)} of {row.actor} {problem}"


def _of_line(row: TrajectoryRow, log: AckLines | None, ledger: LedgerRows) -> str | None:
    if row.line is None:
        return "names no line of the log that its actor keeps" if log is not None and log.puts else None
    if log is None:
        return f"names line {row.line} of a log that is missing"
    if problem := _unlike(log, row.line, row.head):
        return problem
    line, group = log.puts.get(row.line), ledger.groups.get(row.group)
    if line is None:
        return f"names line {row.line}, which announces no put"
    compared = {
        "trajectory": ((line.branch, line.group, line.index), (row.branch, row.group, row.index)),
        "attempt": (line.attempt, row.attempt),
        "digest": (line.digest, row.digest),
        "task": (line.task_id, group and group.task_id),
        "versions": (line.versions, row.versions),
        "tokens": (line.tokens, row.tokens),
        "turns": (line.turns, row.turns),
        "reward": (line.reward, row.reward),
        "environment": (line.env, row.env),
        "stop reason": (line.stop_reason, row.stop_reason),
        "length": (line.seconds, ledger.seconds_of.get((row.group, row.index, row.attempt), line.seconds)),
    }
    return next(
        (f"has {what} {b}, its actor announced {a} at line {row.line}" for what, (a, b) in compared.items() if a != b),
        None,
    )


def logs_reach_what_was_said(ledger: LedgerRows, logs: Logs) -> Iterator[str]:
    """No log is shorter than its actor said it was, and what it said is its beginning."""
    by_actor = {log.actor: log for log in logs}
    for row in ledger.tables["logs"]:
        log = by_actor.get(row["actor"])
        problem = "is missing" if log is None else _unlike(log, row["line"], row["head"])
        if problem:
            yield f"the log of {row['actor']}, which had {row['line'] + 1} lines, {problem}"


def evaluations_were_announced(ledger: LedgerRows, logs: Logs) -> Iterator[str]:
    """Every result of an evaluation was announced by an actor, played by the pinned version, and none is missing."""
    if not any(log.puts for log in logs):
        return
    sets = {row["serial"]: row for row in ledger.tables["evals"]}
    lines: dict[tuple[int, int, int], list[PutLine]] = {}
    for line in (line for log in logs for line in log.puts.values() if line.kind == "eval"):
        lines.setdefault((*place_of(line.group), line.index), []).append(line)
    results = {(row["serial"], row["task"], row["idx"]): row for row in ledger.tables["eval_results"]}
    for key, row in results.items():
        of = sets.get(key[0])
        if row["digest"] and not any(_is_result(line, row, of) for line in lines.get(key, ())):
            yield f"the result {key[2]} of task {key[1]} in evaluation {key[0]} is not what an actor announced"
    for serial, task, index in sorted(lines.keys() - results.keys()):
        if serial in sets and sets[serial]["state"] == "done":
            yield f"evaluation {serial} is done and lacks result {index} of task {task}, which an actor announced"


def _is_result(line: PutLine, row: dict[str, Any], of: dict[str, Any] | None) -> bool:
    said = (line.digest, line.reward, line.task_id, dict(line.rewards))
    if of is None or said != (row["digest"], row["reward"], row["task_id"], _json(row["rewards"])):
        return False
    return line.branch == of["on_branch"] and {version for version, _ in line.versions} == {of["version"]}


def _unlike(log: AckLines, line: int, head: str | None) -> str | None:
    """How a log is not the one that had this head at this line."""
    if line not in log.heads:
        return f"ends before line {line}: lines were cut off"
    if log.heads[line] != head:
        return f"is not what it was when line {line} was written: lines up to there were changed or removed"
    return None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


ANNOUNCED: tuple[Check, ...] = (
    trajectories_have_lines,
    logs_reach_what_was_said,
    evaluations_were_announced,
)
