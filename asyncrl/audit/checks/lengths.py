"""How long episodes took (`buffer.turns: auto`), and that the turns of a group are recorded if they took so long."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

from asyncrl.audit.ledger import GroupRow, LedgerRows
from asyncrl.audit.table import Check, apply
from asyncrl.audit.witnesses import Bounds
from asyncrl.buffer.tickets.lengths import WINDOW, long_enough

Rules = Sequence[Bounds]


def lengths(ledger: LedgerRows, rules: Rules) -> Iterator[str]:
    """`rules` are those of every configuration that the run had."""
    return apply(LENGTHS, ledger, rules)


def lengths_are_of_attempts(ledger: LedgerRows, rules: Rules) -> Iterator[str]:
    """Lengths are numbered without gaps, each of an attempt that was put or lasted longer than `turns_auto_s`."""
    known = {(a.group, a.index, a.attempt): a for attempts in ledger.attempts.values() for a in attempts}
    limits = [r.turns_auto_s for r in rules if r.turns_auto_s is not None]
    seen: set[tuple[int, int, int, float]] = set()
    for expected, row in enumerate(ledger.tables["lengths"]):
        key = row["grp"], row["idx"], row["attempt"]
        attempt = known.get(key)
        brought = attempt is not None and attempt.ended in ("stored", "late", "lost")
        long = attempt is not None and attempt.ended is not None and any(row["seconds"] > limit for limit in limits)
        if row["serial"] != expected or not (brought or long) or row["seconds"] < 0:
            yield f"length {row['serial']}, {row['seconds']} s of {key}, is of no attempt that took so long"
        lost = attempt is not None and attempt.ended == "lost"  # it may have been put once more
        if (*key, row["seconds"]) in seen and not lost:
            yield f"length {row['serial']} is of {key}, which has it already"
        seen.add((*key, row["seconds"]))


def stored_trajectories_have_lengths(ledger: LedgerRows, rules: Rules) -> Iterator[str]:
    """Every trajectory that was stored under `buffer.turns: auto` has its length."""
    measured = {(row["grp"], row["idx"], row["attempt"]) for row in ledger.tables["lengths"]}
    for row in ledger.trajectories.values() if all(r.turns_auto_s is not None for r in rules) else ():
        if (row.group, row.index, row.attempt) not in measured:
            yield f"how long trajectory {ledger.name(row.group, row.index)} took is not recorded"


def groups_are_durable_if_episodes_are_long(ledger: LedgerRows, rules: Rules) -> Iterator[str]:
    """The turns of a group are recorded as `buffer.turns` says; under auto, if the lengths before it say so."""
    rows, recent = ledger.tables["lengths"], defaultdict[str, deque[float]](lambda: deque(maxlen=WINDOW))
    taken = 0
    for group in ledger.groups.values():
        known = taken if group.lengths is None else group.lengths
        if not taken <= known <= len(rows):
            yield f"group {group.number} was decided by {known} lengths, out of order: {taken} were there before"
            continue
        for row in rows[taken:known]:
            of = ledger.groups.get(row["grp"])
            recent[of.task_env if of is not None else ""].append(row["seconds"])
        taken = known
        if not any(_fits(group, list(recent[group.task_env]), r) for r in rules):
            are = "are" if group.durable else "are not"
            yield f"the turns of group {group.number} {are} recorded, which does not follow from buffer.turns"


def _fits(group: GroupRow, seconds: list[float], r: Bounds) -> bool:
    if (group.lengths is None) != (r.turns_auto_s is None):
        return False
    expected = r.durable if r.turns_auto_s is None else long_enough(seconds, r.turns_auto_s)
    return group.durable == expected


def groups_name_the_environment_of_their_task(ledger: LedgerRows, rules: Rules) -> Iterator[str]:
    """A group of a mix names the environment of its task, which its trajectories are of; others name none."""
    for group in ledger.groups.values():
        played = {row.env for row in ledger.members.get(group.number, ())}
        if (not group.task_env) != (not rules[-1].mixed) or (group.task_env and not played <= {group.task_env}):
            yield f"group {group.number} is of the environment {group.task_env!r}, its trajectories of {sorted(played)}"


LENGTHS: tuple[Check, ...] = (
    lengths_are_of_attempts,
    stored_trajectories_have_lengths,
    groups_are_durable_if_episodes_are_long,
    groups_name_the_environment_of_their_task,
)
