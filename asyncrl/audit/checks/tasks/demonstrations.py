"""Every batch takes the demonstrations that follow those of the batch before it, in the order of the data seed, and the
learner trained on these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from asyncrl.audit.ledger import BatchRow, DemonstrationRow, LedgerRows
from asyncrl.audit.table import Check, apply
from asyncrl.audit.witnesses import LearnerList
from asyncrl.data.demonstrations import Demonstrations


@dataclass(frozen=True, slots=True)
class Shown:
    """What the ledger's rows are compared with."""

    data: Demonstrations | None
    """The files, read again."""
    per_step: int
    lists: Sequence[LearnerList] = ()


def demonstrations(ledger: LedgerRows, shown: Shown) -> Iterator[str]:
    return apply(DEMONSTRATIONS, ledger, shown)


def files_are_those_of_the_run(ledger: LedgerRows, shown: Shown) -> Iterator[str]:
    """The rows of `data.demonstrations` are those that the run began with."""
    now = None if shown.data is None else shown.data.digest
    if now != ledger.demonstrations_digest:
        yield f"data.demonstrations has the digest {now}, the run began with {ledger.demonstrations_digest}"


def batches_take_the_next(ledger: LedgerRows, shown: Shown) -> Iterator[str]:
    """A batch, also one that was skipped or left, takes the next `learner.demonstrations.per_step` draws, in order."""
    left = dict(ledger.demonstrations)
    for batch in ledger.batches:
        rows = left.pop(batch.serial, [])
        first = _cursor(ledger, batch)
        expected = [(place, first + place) for place in range(shown.per_step)]
        if [(row.place, row.draw) for row in rows] != expected:
            yield (
                f"batch {batch.b} of branch {batch.branch} takes the demonstrations {_named(rows)}; expected "
                f"{shown.per_step} from draw {first} on, in order"
            )
    for serial in left:
        yield f"demonstrations are recorded for batch serial {serial}, which is not in the ledger"


def draws_follow_from_the_seed(ledger: LedgerRows, shown: Shown) -> Iterator[str]:
    """Every draw is of the row that the data seed gives, byte for byte as it stands in the file."""
    if shown.data is None:
        return
    for rows in ledger.demonstrations.values():
        for row in rows:
            line = shown.data.row(row.draw) if row.draw >= 0 else -1
            if row.row != line or row.digest != shown.data.digest_of(line):
                yield (
                    f"demonstration {row.draw} is recorded as row {row.row} with digest {row.digest}; the seed says "
                    f"row {line}, {shown.data.digest_of(line)}"
                )


def learner_trained_on_these(ledger: LedgerRows, shown: Shown) -> Iterator[str]:
    """The learner trained on the demonstrations that the ledger names, in this order."""
    for each in shown.lists:
        for done in each.done:
            batch = ledger.batch_of(each.branch, done.batch)
            if batch is None or done.outcome == "skipped":
                continue
            digests = [row.digest for row in ledger.demonstrations.get(batch.serial, ())]
            if done.demonstrations != digests:
                yield (
                    f"batch {done.batch} in the learner's list ({each.checkpoint}) holds {len(done.demonstrations)} "
                    f"demonstrations, not the {len(digests)} of the ledger in their order"
                )


def _cursor(ledger: LedgerRows, batch: BatchRow) -> int:
    """The draw behind those of the batch before this one."""
    before = ledger.batch_of(batch.branch, batch.b - 1) if batch.b > 0 else None
    rows = ledger.demonstrations.get(before.serial, ()) if before is not None else ()
    return max((row.draw for row in rows), default=-1) + 1


def _named(rows: Sequence[DemonstrationRow]) -> str:
    return ", ".join(str(row.draw) for row in rows[:20]) or "none"


DEMONSTRATIONS: tuple[Check, ...] = (
    files_are_those_of_the_run,
    batches_take_the_next,
    draws_follow_from_the_seed,
    learner_trained_on_these,
)
