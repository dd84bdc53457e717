"""The slots of the actors under `launch.tuning: auto`: what the ends of batches decided, and which tickets were lent.

Each decision is made again from the batches before it and what was measured of them. How many tickets an actor held
when it got another one follows from the ledger: every attempt has its place in the order of issue, and says how many
were issued before it ended. A run that was tuned under some of its configurations only is not judged by these.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from asyncrl.audit.checks.bounds import Decided, name
from asyncrl.audit.ledger import AttemptRow, BatchRow, LedgerRows
from asyncrl.audit.table import Check, apply
from asyncrl.audit.witnesses import Bounds
from asyncrl.buffer.bounds.slots import slots_after
from asyncrl.buffer.ledger.records import Tuned

Rules = Sequence[Bounds]

_NEVER = 1 << 62


def slots(ledger: LedgerRows, rules: Rules) -> Iterator[str]:
    """`rules` are those of every configuration that the run had."""
    return apply(SLOTS, Decided(ledger), rules)


def slots_are_decided_once_a_batch_ends(decided: Decided, rules: Rules) -> Iterator[str]:
    """Under `launch.tuning: auto` the end of every batch decides the slots; else they are never decided."""
    for batch in decided.ledger.batches:
        is_decided = batch.tuned is not None
        if batch.outcome is None and is_decided:
            yield f"{name(batch)} is open, and the slots after it are decided"
        elif batch.outcome is not None and all((r.tuning is None) == is_decided for r in rules) and not batch.damaged:
            yield f"{name(batch)} has {'a' if is_decided else 'no'} decision about the slots after it"


def slots_follow_from_what_was_measured(decided: Decided, rules: Rules) -> Iterator[str]:
    """Each change of the slots is the one that the batches before it and their measures give, with its reason."""
    for batch in decided.ledger.batches:
        made, line = batch.tuned, decided.until(batch)
        if made is None or not line or decided.taken_over(batch):
            continue
        expected = [slots_after(limits, line) for limits in {r.tuning for r in rules} if limits is not None]
        if (made.slots, made.why) not in expected and expected:
            number, why = expected[-1]
            yield f"{name(batch)} decides {made.slots} slots ({made.why}); measured, it is {number} ({why})"


def slots_hold_from_the_end_of_their_batch(decided: Decided, _: Rules) -> Iterator[str]:
    """The slots that a batch decides hold for the attempts that were issued after it ended.

    Its own attempts came before, and so did the end of the batch before it; the publication of its version came after.
    """
    ledger, issued = decided.ledger, sum(len(attempts) for attempts in decided.ledger.attempts.values())
    of_version = {(row["branch"], row["version"]): row["attempts"] for row in ledger.tables["published"]}
    least: defaultdict[int, int] = defaultdict(int)
    for batch, tuned in _tuned_on_their_branch(decided):
        low, high = max(least[batch.branch], _last_issued(ledger, batch) + 1), issued
        if batch.outcome == "applied":
            high = of_version.get((batch.branch, batch.version_after), issued)
        if not low <= tuned.lent <= high and not decided.taken_over(batch):
            yield f"{name(batch)} ended after {tuned.lent} attempts were issued, not {low} to {high}"
        least[batch.branch] = max(least[batch.branch], tuned.lent)


def _tuned_on_their_branch(decided: Decided) -> Iterator[tuple[BatchRow, Tuned]]:
    """The batches that decided slots, in order, by the branch on which they were fixed."""
    for branch, line in decided.of_branch.items():
        yield from ((batch, batch.tuned) for batch in line if batch.branch == branch and batch.tuned is not None)


def _last_issued(ledger: LedgerRows, batch: BatchRow) -> int:
    """Serial of the last attempt that brought a trajectory of this batch; -1: of a batch that was released, whose
    groups may have been played again."""
    if batch.released:
        return -1
    stored = (row for number in batch.groups for row in ledger.members.get(number, ()))
    attempts = ((row.attempt, ledger.attempts.get((row.group, row.index), [])) for row in stored)
    return max((a.serial for number, of_it in attempts for a in of_it if a.attempt == number), default=-1)


def attempts_end_after_they_begin(decided: Decided, _: Rules) -> Iterator[str]:
    """An attempt that has ended did so after its issue and before the next attempt at its ticket."""
    ledger = decided.ledger
    issued = sum(len(attempts) for attempts in ledger.attempts.values())
    for key, attempts in ledger.attempts.items():
        for place, a in enumerate(attempts):
            following = [attempts[place + 1].serial] if place + 1 < len(attempts) else []
            most = min([issued, *following])
            ended = a.ended_serial
            if (ended is None) != (a.ended is None) or (ended is not None and not a.serial < ended <= most):
                yield (
                    f"attempt {a.attempt} at trajectory {ledger.name(*key)}, number {a.serial} of all, has ended "
                    f"({a.ended}) after {ended} were issued; at most {most} can have been"
                )


def actors_hold_no_more_tickets_than_slots(decided: Decided, rules: Rules) -> Iterator[str]:
    """No actor got a ticket by which it held more than the slots in force."""
    limits = {r.tuning for r in rules}
    if None in limits:
        return
    in_force = {branch: _in_force(decided, branch) for branch in decided.ledger.branches}
    for a, held in _held(decided.ledger):
        number = in_force[a.branch](a.serial) if a.branch in in_force else None
        most = max(each.within(each.start if number is None else number) for each in limits if each is not None)
        if held > most:
            yield f"{a.actor} held {held} tickets with attempt {a.serial} of all, and {most} slots were in force"


def _held(ledger: LedgerRows) -> Iterator[tuple[AttemptRow, int]]:
    """Every attempt in the order of issue, with the tickets that its actor held then, this one among them."""
    ends: defaultdict[str, list[int]] = defaultdict(list)
    """By actor, when the attempts end that it holds: as a heap."""
    for a in sorted((a for attempts in ledger.attempts.values() for a in attempts), key=lambda a: a.serial):
        held = ends[a.actor]
        while held and held[0] <= a.serial:
            heapq.heappop(held)
        heapq.heappush(held, _NEVER if a.ended_serial is None else a.ended_serial)
        yield a, len(held)


def _in_force(decided: Decided, branch: int) -> Callable[[int], int | None]:
    """Takes the serial of an attempt on a branch; gives the slots that were decided last before it. None: nothing
    was."""
    found = [(b.tuned.lent if b.branch == branch else -1, b.tuned.slots) for b in decided.of_branch[branch] if b.tuned]
    places, numbers = [lent for lent, _ in found], [number for _, number in found]

    def at(serial: int) -> int | None:
        place = bisect_right(places, serial)
        return numbers[place - 1] if place else None

    return at


SLOTS: tuple[Check, ...] = (
    slots_are_decided_once_a_batch_ends,
    slots_follow_from_what_was_measured,
    slots_hold_from_the_end_of_their_batch,
    attempts_end_after_they_begin,
    actors_hold_no_more_tickets_than_slots,
)
