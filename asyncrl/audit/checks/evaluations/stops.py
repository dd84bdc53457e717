"""The stops that results of evaluations asked for: each follows from its result, and none is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from asyncrl.audit.ledger import BatchRow, LedgerRows
from asyncrl.audit.table import Check, apply
from asyncrl.audit.witnesses import Bounds
from asyncrl.buffer.evaluations.choices import Measured, on_line, voids
from asyncrl.buffer.evaluations.choices import stops as asked_for
from asyncrl.config.choosing import Choosing

Rules = Sequence[Bounds]


def stops(ledger: LedgerRows, rules: Rules) -> Iterator[str]:
    return apply(STOPS, ledger, rules)


def stops_follow_from_a_result(ledger: LedgerRows, rules: Rules) -> Iterator[str]:
    """A stop has the reason that the results of then give, under a configuration of the run; a result acts once."""
    acted: set[int] = set()
    for row in ledger.tables["stops"]:
        then = [m for m in _measured(ledger, row["fixed"]) if m.serial <= row["eval"]]
        line = on_line(then, _forks(ledger), row["branch"])
        expected = {(stop.eval, stop.why) for r in rules for stop in asked_for(line, r.choosing, acted)}
        if (row["eval"], row["why"]) not in expected:
            yield f"{_name(row)} is there because {row['why']!r}; the results give {sorted(expected)}"
        acted.add(row["eval"])


def stops_are_at_the_end_of_their_line(ledger: LedgerRows, _: Rules) -> Iterator[str]:
    """A stop is at the version of its batch, which was never fixed; only a redo from its result on does not void it."""
    for row in ledger.tables["stops"]:
        before = ledger.batch_of(row["branch"], row["batch"] - 1) if row["batch"] else None
        version = 0 if not row["batch"] else None if before is None else before.version_after
        if row["branch"] not in ledger.branches or row["version"] != version:
            yield f"{_name(row)} is at version {row['version']}; the batch before it makes {version}"
        if ledger.fixed_on(row["branch"], row["batch"]) is not None:
            yield f"{_name(row)} is in front of a batch that was fixed"
        yield from _place_among_batches(ledger, row)


def _place_among_batches(ledger: LedgerRows, row: dict[str, Any]) -> Iterator[str]:
    fixed = sum(batch.branch <= row["branch"] for batch in ledger.batches)
    if row["fixed"] != fixed:
        yield f"{_name(row)} is behind {row['fixed']} batches; {fixed} were fixed on its branch and before"
    due = next((e["due"] for e in ledger.tables["evals"] if e["serial"] == row["eval"]), 0)
    later = (b for b in ledger.branches.values() if b.branch > row["branch"] and b.fork_batch <= row["batch"])
    left = any(voids(branch.why, branch.fork_version, due) for branch in later)
    if row["released"] != left:
        yield f"{_name(row)} is {'' if row['released'] else 'not '}voided; the branches behind it say otherwise"


def no_batch_was_fixed_in_place_of_a_stop(ledger: LedgerRows, rules: Rules) -> Iterator[str]:
    """No batch was fixed while a result asked for a stop."""
    choices = {(r.choosing.stop_at, r.choosing.patience) for r in rules}
    if len(choices) != 1:
        return  # which one was in force at a batch is not recorded
    choosing = Choosing(*next(iter(choices)))
    for place, batch in enumerate(ledger.batches):
        if not (choosing.stop_at or choosing.patience) or _again(ledger, batch, place):
            continue
        line = on_line(_measured(ledger, place), _forks(ledger), batch.branch)
        acted = {row["eval"] for row in ledger.tables["stops"] if row["fixed"] <= place}
        for stop in asked_for(line, choosing, acted):
            yield f"batch {batch.b} of branch {batch.branch} was fixed, and the run was to stop before it: {stop.why}"


def ends_are_between_batches(ledger: LedgerRows, _: Rules) -> Iterator[str]:
    """An evaluation ended behind the batches that made its version, and every one that ended says behind which."""
    for row in ledger.tables["evals"]:
        if (row["fixed"] is None) != (row["ended_at"] is None):
            yield f"evaluation {row['serial']} ended at {row['ended_at']}, behind {row['fixed']} batches"
        elif row["fixed"] is not None and not row["version"] <= row["fixed"] <= len(ledger.batches):
            yield f"evaluation {row['serial']} of version {row['version']} ended behind {row['fixed']} batches"


def _measured(ledger: LedgerRows, fixed: int) -> list[Measured]:
    """What was measured before more than `fixed` batches were fixed."""
    evals = {r["serial"]: r for r in ledger.tables["evals"] if r["state"] == "done" and (r["fixed"] or 0) <= fixed}
    return [
        Measured(e["serial"], (e["name"], m["way"]), e["branch"], e["due"], (e["on_branch"], e["version"]), m["share"])
        for m in ledger.tables["eval_measures"]
        if (e := evals.get(m["serial"])) is not None
    ]


def _forks(ledger: LedgerRows) -> dict[int, int]:
    return {branch: row.fork_version for branch, row in ledger.branches.items()}


def _again(ledger: LedgerRows, batch: BatchRow, place: int) -> bool:
    """The batch was fixed before, on the branch from which its own one begins: nobody asked for it."""
    return any(old.b == batch.b and old.groups == batch.groups for old in ledger.batches[:place])


def _name(row: dict[str, Any]) -> str:
    return f"stop {row['serial']}, before batch {row['batch']} of branch {row['branch']},"


STOPS: tuple[Check, ...] = (
    stops_follow_from_a_result,
    stops_are_at_the_end_of_their_line,
    no_batch_was_fixed_in_place_of_a_stop,
    ends_are_between_batches,
)
