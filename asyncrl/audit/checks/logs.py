"""What actors and the learner wrote down themselves agrees with the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from asyncrl.audit.actor_logs import Ack, AckLines, TurnLine
from asyncrl.audit.ledger import BatchRow, LedgerRows
from asyncrl.audit.table import Check, apply
from asyncrl.audit.witnesses import LearnerList
from asyncrl.learner.checkpoints.checkpoints import Done, group_digests


def acknowledgements(ledger: LedgerRows, log: AckLines) -> Iterator[str]:
    return apply(ACKNOWLEDGEMENTS, ledger, log)


def learner(ledger: LedgerRows, done_list: LearnerList) -> Iterator[str]:
    return apply(LEARNER, ledger, done_list)


# --- the actors' logs -------------------------------------------------------------------------------------------------


def lines_can_be_read(_: LedgerRows, log: AckLines) -> Iterator[str]:
    """An actor's log holds acknowledgements, numbered without gaps."""
    for line in log.unreadable:
        yield f"acks/{log.actor}.jsonl line {line} is no acknowledgement"
    for n in log.missing:
        yield f"acks/{log.actor}.jsonl lacks acknowledgement {n}: the lines are numbered without gaps"


def acknowledged_is_stored(ledger: LedgerRows, log: AckLines) -> Iterator[str]:
    """What an actor was told is stored is in the ledger with the same digest."""
    for ack in log.acks:
        if problem := contradiction(ledger, ack):
            yield f"{log.actor} was told that {ack.branch}.{ack.group}.{ack.index} is stored, and {problem}"


def contradiction(ledger: LedgerRows, ack: Ack) -> str | None:
    """How the ledger contradicts the acknowledgement; a loss that the failure model allows (`loss`) does not."""
    if loss(ledger, ack):
        return None
    row = ledger.trajectories.get((ack.group, ack.index))
    if ack.group not in ledger.groups:
        return f"the ledger has no group {ack.group}"
    if row is None:
        return "the ledger does not have it"
    if row.digest != ack.digest:
        return f"the ledger has digest {row.digest}, the actor {ack.digest}"
    attempts = ledger.attempts.get((ack.group, ack.index), ())
    if (ack.attempt, ack.branch) not in ((a.attempt, a.branch) for a in attempts):
        return f"its attempt {ack.attempt} on branch {ack.branch} is not in the ledger"
    return None


def loss(ledger: LedgerRows, ack: Ack) -> str | None:
    """How an acknowledged trajectory was lost, as the failure model allows. None: it was not lost.

    `host`: it was lost with the buffer's host, and the run continued from a checkpoint, whose own ledger does not have
    it either. `disk`: after a power cut the
    buffer found its bytes missing (`buffer.fsync` bounds that) and had it generated again.
    """
    row = ledger.trajectories.get((ack.group, ack.index))
    if row is not None and (row.digest, row.branch) == (ack.digest, ack.branch):
        return None
    attempts = ledger.attempts.get((ack.group, ack.index), ())
    if any((a.attempt, a.branch, a.ended) == (ack.attempt, ack.branch, "lost") for a in attempts):
        return "disk"
    # The restored ledger did not have it yet: its group was in flight, or was not issued.
    free = row is None or row.branch is None or row.branch > ack.branch
    covered = (ack.branch, ack.group, ack.index, ack.digest) in ledger.in_checkpoints
    if ledger.restored_at(ack.branch) is not None and not covered and free:
        return "host"
    return None


def acknowledged_turns_are_recorded(ledger: LedgerRows, log: AckLines) -> Iterator[str]:
    """A recorded turn of which an actor was told that it is stored is in the ledger, with the same tokens."""
    for line in log.turns:
        if not turn_was_lost(ledger, line) and (problem := _unlike(ledger, line)):
            yield f"{log.actor} was told that {line} is stored, and {problem}"


def turn_was_lost(ledger: LedgerRows, line: TurnLine) -> bool:
    """Whether it was lost with the buffer's host, and the run continued from a checkpoint that does not have it."""
    place = (line.branch, line.group, line.index, line.attempt, line.number, line.form, line.tokens)
    lost = ledger.restored_at(line.branch) is not None and place not in ledger.turns_in_checkpoints
    return lost and bool(_unlike(ledger, line))


def _unlike(ledger: LedgerRows, line: TurnLine) -> str:
    """What the ledger says of it instead; empty: the same."""
    attempts = ledger.attempts.get((line.group, line.index), ())
    if (line.attempt, line.branch) not in ((a.attempt, a.branch) for a in attempts):
        return "its attempt is not in the ledger"
    row = ledger.turn_of.get((line.group, line.index, line.attempt, line.number, line.form))
    if row is None:
        return "the ledger does not have it"
    names = ("sampled", "oldest", "newest", "tokens")
    said, has = ([of[name] for name in names] for of in (asdict(line), row))
    return f"the ledger says {has} of it, the actor {said}" if said != has else ""


# --- the learner's lists ----------------------------------------------------------------------------------------------


def lists_name_each_batch_once(_: LedgerRows, done_list: LearnerList) -> Iterator[str]:
    """The learner's list names every batch before its checkpoint once."""
    if [done.batch for done in done_list.done] != list(range(done_list.batch)):
        yield f"the list in {done_list.checkpoint} does not name the batches 0 to {done_list.batch - 1}, each once"


def checkpoints_are_as_written(_: LedgerRows, done_list: LearnerList) -> Iterator[str]:
    """Every file of a checkpoint is what the learner wrote."""
    for name in done_list.changed:
        yield f"{done_list.checkpoint}/{name} is not what was written"


def batches_are_in_the_ledger(ledger: LedgerRows, done_list: LearnerList) -> Iterator[str]:
    """The learner's batches are in the ledger with the same outcome, unless they were lost with a host."""
    for done, batch, where in _compared(ledger, done_list):
        if batch is None:
            at = ledger.restored_at(done_list.branch)
            if at is None or done.batch < at[0]:
                yield f"{where} is not in the ledger"
        elif done.outcome != batch.outcome and (done.outcome, batch.outcome) not in _SKIPPED:
            yield f"{where} is {done.outcome}, the ledger says {batch.outcome or 'open'}"


def batches_hold_the_same_groups(ledger: LedgerRows, done_list: LearnerList) -> Iterator[str]:
    """The learner trained the groups that the ledger names."""
    for done, batch, where in _compared(ledger, done_list):
        if batch is not None and done.outcome != "skipped" and sorted(done.groups) != sorted(batch.groups):
            yield f"{where} holds groups {sorted(done.groups)}, the ledger says {sorted(batch.groups)}"


def groups_have_the_same_digests(ledger: LedgerRows, done_list: LearnerList) -> Iterator[str]:
    """The groups that the learner trained are byte for byte those of the ledger."""
    for done, batch, where in _compared(ledger, done_list):
        if batch is None or done.outcome == "skipped" or sorted(done.groups) != sorted(batch.groups):
            continue
        for number, digest in done.groups.items():
            digests = tuple(row.digest for row in ledger.members.get(number, ()))
            digests += ledger.scores_used.get((batch.serial, number), ())
            if group_digests([number] * len(digests), digests).get(number) != digest:
                yield f"group {number} of {where} is of another digest than the ledger's trajectories"


_SKIPPED = (("skipped", "guard"), ("skipped", "poison"))
"""Outcomes that mean the same: (in the learner's list, in the ledger)."""


def _compared(ledger: LedgerRows, done_list: LearnerList) -> Iterator[tuple[Done, BatchRow | None, str]]:
    """Each batch of the list, with the ledger's row of it and a name for both."""
    for done in done_list.done:
        where = f"batch {done.batch} in the learner's list ({done_list.checkpoint})"
        yield done, ledger.batch_of(done_list.branch, done.batch), where


ACKNOWLEDGEMENTS: tuple[Check, ...] = (lines_can_be_read, acknowledged_is_stored, acknowledged_turns_are_recorded)
LEARNER: tuple[Check, ...] = (
    lists_name_each_batch_once,
    checkpoints_are_as_written,
    batches_are_in_the_ledger,
    batches_hold_the_same_groups,
    groups_have_the_same_digests,
)
