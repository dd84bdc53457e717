"""What actors and the learner wrote down themselves agrees with the ledger."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.audit.actor_logs import Ack, AckLines
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
    group, row = ledger.groups.get(ack.group), ledger.trajectories.get((ack.group, ack.index))
    if group is None or group.branch != ack.branch:
        return f"the ledger has no group {ack.group} on branch {ack.branch}"
    if row is None:
        return "the ledger does not have it"
    if row.digest != ack.digest:
        return f"the ledger has digest {row.digest}, the actor {ack.digest}"
    if ack.attempt not in (a.attempt for a in ledger.attempts.get((ack.group, ack.index), ())):
        return f"its attempt {ack.attempt} is not in the ledger"
    return None


def loss(ledger: LedgerRows, ack: Ack) -> str | None:
    """How an acknowledged trajectory was lost, as the failure model allows. None: it was not lost.

    `host`: it was lost with the buffer's host, and the run continued from a checkpoint, whose own ledger does not have
    it either. `disk`: after a power cut the
    buffer found its bytes missing (`buffer.fsync` bounds that) and had it generated again.
    """
    group, row = ledger.groups.get(ack.group), ledger.trajectories.get((ack.group, ack.index))
    if row is not None and row.digest == ack.digest and group is not None and group.branch == ack.branch:
        return None
    attempts = ledger.attempts.get((ack.group, ack.index), ())
    if any(a.attempt == ack.attempt and a.ended == "lost" for a in attempts):
        return "disk"
    recorded = group is not None and group.branch == ack.branch
    # Groups that the new branch will drop are still in flight until a learner starts it.
    discarded = group is not None and (group.reason == "discarded_branch" or (ledger.restored and row is None))
    covered = (ack.branch, ack.group, ack.index, ack.digest) in ledger.in_checkpoints
    if ledger.restored_at(ack.branch) is not None and not covered and (not recorded or discarded):
        return "host"
    return None


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


ACKNOWLEDGEMENTS: tuple[Check, ...] = (lines_can_be_read, acknowledged_is_stored)
LEARNER: tuple[Check, ...] = (
    lists_name_each_batch_once,
    checkpoints_are_as_written,
    batches_are_in_the_ledger,
    batches_hold_the_same_groups,
    groups_have_the_same_digests,
)
