"""The ledger's rows about groups, attempts and trajectories refer to each other without a gap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from asyncrl.audit.ledger import AttemptRow, LedgerRows, TrajectoryRow
from asyncrl.audit.table import Check, apply


def rows(ledger: LedgerRows) -> Iterator[str]:
    return apply(ROWS, ledger)


def groups_are_numbered(ledger: LedgerRows) -> Iterator[str]:
    """Groups are numbered without gaps."""
    missing = next((expected for expected, number in enumerate(ledger.groups) if number != expected), None)
    if missing is not None:
        yield f"group {missing} is missing from the ledger: groups are numbered without gaps"


def groups_have_branches(ledger: LedgerRows) -> Iterator[str]:
    """Every group is of a branch in the ledger."""
    for number, group in ledger.groups.items():
        if group.branch not in ledger.branches:
            yield f"group {number} is of branch {group.branch}, which is not in the ledger"


def groups_are_of_the_branch_that_issued_them(ledger: LedgerRows) -> Iterator[str]:
    """A group is of the branch on which its first ticket was lent."""
    first: dict[int, AttemptRow] = {}
    for a in sorted((a for attempts in ledger.attempts.values() for a in attempts), key=lambda a: a.serial):
        first.setdefault(a.group, a)
    for number, a in first.items():
        group = ledger.groups.get(number)
        if group is not None and group.branch != a.branch:
            yield f"group {number} is of branch {group.branch}, and its first ticket was lent on branch {a.branch}"


def attempts_have_tickets(ledger: LedgerRows) -> Iterator[str]:
    """Every attempt is at a ticket of a group in the ledger."""
    for number, index in sorted(ledger.attempts.keys() - _tickets(ledger)):
        yield f"attempts at trajectory {ledger.name(number, index)} are recorded, and the ledger has no such ticket"


def attempts_are_numbered(ledger: LedgerRows) -> Iterator[str]:
    """The attempts at a trajectory are numbered without gaps."""
    for key, attempts in ledger.attempts.items():
        if [a.attempt for a in attempts] != list(range(len(attempts))):
            yield (
                f"attempts at trajectory {ledger.name(*key)} are {[a.attempt for a in attempts]}, expected 0, 1, ... "
                "without gaps"
            )


def stored_attempts_have_trajectories(ledger: LedgerRows) -> Iterator[str]:
    """An attempt that ended as stored has its trajectory in the ledger."""
    for key in sorted(_tickets(ledger) - ledger.trajectories.keys()):
        if any(a.ended == "stored" for a in ledger.attempts.get(key, ())):
            yield f"trajectory {ledger.name(*key)} is missing from the ledger: an attempt at it ended as stored"


def trajectories_have_groups(ledger: LedgerRows) -> Iterator[str]:
    """Every trajectory is of a group in the ledger."""
    for number, index in ledger.trajectories:
        if number not in ledger.groups:
            yield f"trajectory {ledger.name(number, index)} is stored, and the ledger has no group {number}"


def trajectories_have_attempts(ledger: LedgerRows) -> Iterator[str]:
    """Every trajectory was stored from an attempt in the ledger, by its actor, with versions that this actor held."""
    for key, row in ledger.trajectories.items():
        if row.group in ledger.groups and (problem := _of_attempt(row, ledger.attempts.get(key, ()))):
            yield f"trajectory {ledger.name(*key)} {problem}"


def _of_attempt(row: TrajectoryRow, attempts: Sequence[AttemptRow]) -> str | None:
    attempt = next((a for a in attempts if a.attempt == row.attempt), None)
    if attempt is None:
        return f"was stored from attempt {row.attempt}, which is not in the ledger"
    if attempt.ended not in ("stored", "lost"):
        return f"was stored from attempt {row.attempt}, which ended as {attempt.ended}"
    if attempt.actor != row.actor:
        return f"is of {row.actor}, its ticket was leased to {attempt.actor}"
    if row.oldest < attempt.min_version:
        return (
            f"has tokens of version {row.oldest}; {row.actor} held at least version {attempt.min_version} when it "
            "leased the ticket"
        )
    return None


def versions_add_up(ledger: LedgerRows) -> Iterator[str]:
    """The token counts per version add up to the trajectory's policy tokens."""
    for key, row in ledger.trajectories.items():
        if sum(count for _, count in row.versions) != row.policy_tokens:
            yield (
                f"trajectory {ledger.name(*key)} has {row.policy_tokens} policy tokens, its versions count "
                f"{row.versions}"
            )


def _tickets(ledger: LedgerRows) -> set[tuple[int, int]]:
    return {(group.number, index) for group in ledger.groups.values() for index in range(group.size)}


ROWS: tuple[Check, ...] = (
    groups_are_numbered,
    groups_have_branches,
    groups_are_of_the_branch_that_issued_them,
    attempts_have_tickets,
    attempts_are_numbered,
    stored_attempts_have_trajectories,
    trajectories_have_groups,
    trajectories_have_attempts,
    versions_add_up,
)
