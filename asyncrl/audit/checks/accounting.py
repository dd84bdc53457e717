"""The states of groups follow from trajectories and batches; batches are full, in one line, and within the bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from typing import get_args

from asyncrl.audit.ledger import BatchRow, GroupRow, LedgerRows, TrajectoryRow
from asyncrl.audit.table import Check, apply
from asyncrl.audit.witnesses import Bounds
from asyncrl.buffer.ledger.group import Reason

REASONS = get_args(Reason)


def equation(ledger: LedgerRows) -> Iterator[str]:
    return apply(EQUATION, ledger)


def uses(ledger: LedgerRows, bounds: Bounds) -> Iterator[str]:
    return apply(USES, ledger, bounds)


def staleness(ledger: LedgerRows, bounds: Bounds) -> Iterator[str]:
    return apply(STALENESS, ledger, bounds)


# --- the equation -----------------------------------------------------------------------------------------------------


def states_follow(ledger: LedgerRows) -> Iterator[str]:
    """Every group is in the one state that trajectories and batches imply, so that the states add up to `issued`."""
    applied = Counter(number for batch in ledger.line if batch.outcome == "applied" for number in batch.groups)
    open_ = {number for batch in ledger.line if batch.outcome is None for number in batch.groups}
    for group in ledger.groups.values():
        stored = len(ledger.members.get(group.number, ()))
        if problem := _state(group, stored, applied[group.number], group.number in open_):
            yield f"group {group.number} {problem}"


def refused_groups_were_in_such_a_batch(ledger: LedgerRows) -> Iterator[str]:
    """A group dropped as guard or poison was last in a batch with this outcome."""
    last = {number: batch.outcome for batch in ledger.line for number in batch.groups}
    for group in ledger.groups.values():
        if group.reason in ("guard", "poison") and last.get(group.number) != group.reason:
            yield f"group {group.number} is dropped: {group.reason}, and no batch with this outcome holds it"


def _state(group: GroupRow, stored: int, applied: int, in_open_batch: bool) -> str | None:
    state = group.state if group.reason is None else f"{group.state}: {group.reason}"
    if (group.reason is not None) != (group.state == "dropped") or (group.reason or REASONS[0]) not in REASONS:
        return f"is {state}, which is no state with a named reason"
    if group.uses != applied:
        return f"counts {group.uses} uses, applied batches hold it {applied} times"
    if (group.state == "assigned") != in_open_batch:
        return f"is {state}, and {'the open batch holds it' if in_open_batch else 'no open batch holds it'}"
    if group.state in ("waiting", "assigned", "trained") and stored != group.size:
        return f"is {state}, and {stored} of its {group.size} trajectories are stored"
    if group.state == "in_flight" and stored == group.size:
        return "is in flight, and all its trajectories are stored"
    if group.state == "trained" and not applied:
        return "is trained, and no applied batch holds it"
    if group.state == "dropped" and applied:
        return f"is {state}, and an applied batch holds it"
    if group.state in ("in_flight", "waiting", "assigned", "trained", "dropped"):
        return None
    return f"is {state}, which is no state"


# --- uses -------------------------------------------------------------------------------------------------------------


def batches_are_numbered(ledger: LedgerRows, _: Bounds) -> Iterator[str]:
    """Batches are numbered without gaps."""
    if (numbered := len(_numbered(ledger))) < len(ledger.line):
        yield f"batch {numbered} is missing from the ledger: batches are numbered without gaps"


def versions_follow_from_outcomes(ledger: LedgerRows, _: Bounds) -> Iterator[str]:
    """A batch was fixed at the version that the outcomes before it make."""
    batches = _numbered(ledger)
    versions = accumulate((batch.outcome == "applied" for batch in batches), initial=0)
    for batch, version in zip(batches, versions, strict=False):
        if batch.version != version:
            yield f"batch {batch.b} was fixed at version {batch.version}; the outcomes before it make {version}"


def only_the_last_is_open(ledger: LedgerRows, _: Bounds) -> Iterator[str]:
    """No batch was fixed while another was open."""
    for batch in _numbered(ledger):
        if batch.outcome is None and batch is not ledger.line[-1]:
            yield f"batch {batch.b} is open, and a later one was fixed"


def batches_are_full(ledger: LedgerRows, bounds: Bounds) -> Iterator[str]:
    """A batch, also one that was left, holds `learner.groups_per_step` groups beside the replayed ones, each once."""
    for batch in (*_numbered(ledger), *(batch for batch in ledger.batches if batch.released)):
        for number, times in Counter(batch.groups).items():
            if times > 1:
                yield f"batch {batch.b} holds group {number} {times} times"
            if number not in ledger.groups:
                yield f"batch {batch.b} holds group {number}, which is not in the ledger"
        if (held := len(batch.groups) - len(batch.replay.drawn)) != bounds.groups_per_step:
            yield f"batch {batch.b} holds {held} groups, a full one has {bounds.groups_per_step}"


def groups_are_used_at_most(ledger: LedgerRows, bounds: Bounds) -> Iterator[str]:
    """A group is in at most `buffer.max_uses` batches."""
    seen: Counter[int] = Counter()
    for batch in _numbered(ledger):
        for number in dict.fromkeys(batch.groups):
            seen[number] += 1
            if number in ledger.groups and seen[number] == bounds.max_uses + 1:
                yield f"group {number} is used again in batch {batch.b}; buffer.max_uses is {bounds.max_uses}"


def _numbered(ledger: LedgerRows) -> list[BatchRow]:
    """The batches before the first gap."""
    gap = next((expected for expected, batch in enumerate(ledger.line) if batch.b != expected), len(ledger.line))
    return ledger.line[:gap]


# --- staleness --------------------------------------------------------------------------------------------------------


def nothing_is_ahead(ledger: LedgerRows, _: Bounds) -> Iterator[str]:
    """No token is of a later version than the batch that trains it."""
    for batch, row in _used(ledger):
        if row.newest > batch.version and not batch.released:
            name = ledger.name(row.group, row.index)
            yield f"trajectory {name} has version {row.newest}, ahead of batch {batch.b}'s {batch.version}"


def nothing_is_of_a_version_that_was_left(ledger: LedgerRows, _: Bounds) -> Iterator[str]:
    """No trajectory of a batch or a live group has a version that a branch begun after it was lent did not have."""
    last = max(ledger.branches, default=0)
    live = ((group.number, last) for group in ledger.groups.values() if group.state not in ("trained", "dropped"))
    used = ((number, batch.branch) for batch in ledger.batches for number in batch.groups)
    for number, until in dict.fromkeys((*used, *live)):
        for row in ledger.members.get(number, ()):
            fork = None if row.branch is None else ledger.left_behind(row.newest, row.branch, until)
            if fork is not None:
                name = f"trajectory {ledger.name(number, row.index)}, lent on branch {row.branch},"
                began = f"branch {fork.branch} began at version {fork.fork_version}"
                yield f"{name} has version {row.newest}; {began}, and branch {until} has it"


def nothing_is_too_old(ledger: LedgerRows, bounds: Bounds) -> Iterator[str]:
    """No trajectory is more versions old than its batch's bound allows, unless old tokens are masked."""
    for batch, row in _used(ledger) if bounds.over_age != "mask" else ():
        age = batch.version - row.oldest
        if age > batch.bound:
            yield (
                f"trajectory {ledger.name(row.group, row.index)} is {age} versions old in batch {batch.b}; "
                f"its bound on staleness is {batch.bound}"
            )


def enough_is_kept(ledger: LedgerRows, bounds: Bounds) -> Iterator[str]:
    """Where old tokens are masked, a group keeps at least `buffer.mask_min_kept` of its tokens."""
    for batch in ledger.batches if bounds.over_age == "mask" else ():
        for number in batch.groups:
            members = ledger.members.get(number, ())
            kept = sum(row.tokens_since(batch.version - batch.bound) for row in members)
            total = sum(row.policy_tokens for row in members)
            if members and (not kept or kept < bounds.mask_min_kept * total):
                yield (
                    f"group {number} keeps {kept} of {total} tokens in batch {batch.b}; buffer.mask_min_kept is "
                    f"{bounds.mask_min_kept}"
                )


def _used(ledger: LedgerRows) -> Iterator[tuple[BatchRow, TrajectoryRow]]:
    """Every use of a trajectory, also in batches of an abandoned branch."""
    for batch in ledger.batches:
        for number in batch.groups:
            for row in ledger.members.get(number, ()):
                yield batch, row


EQUATION: tuple[Check, ...] = (states_follow, refused_groups_were_in_such_a_batch)
USES: tuple[Check, ...] = (
    batches_are_numbered,
    versions_follow_from_outcomes,
    only_the_last_is_open,
    batches_are_full,
    groups_are_used_at_most,
)
STALENESS: tuple[Check, ...] = (
    nothing_is_ahead,
    nothing_is_of_a_version_that_was_left,
    nothing_is_too_old,
    enough_is_kept,
)
