"""The bound on staleness of every batch: that of the configuration, or what the ends of batches decided (`auto`).

Under `auto` each decision is made again from the batches before it and what was measured of them. Why a larger bound
still held for batches is derived in part: which groups waited at that moment, the ledger says only by the batches that
took them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from asyncrl.audit.checks.drops import over_age
from asyncrl.audit.ledger import BatchRow, GroupRow, LedgerRows
from asyncrl.audit.table import Check, apply
from asyncrl.audit.witnesses import Bounds
from asyncrl.buffer.bounds.automatic import LOOKED_AT, Auto, is_lowered, stale_share, target_after
from asyncrl.buffer.ledger.records import Decision

Rules = Sequence[Bounds]


def bounds(ledger: LedgerRows, rules: Rules) -> Iterator[str]:
    """`rules` are those of every configuration that the run had."""
    return apply(BOUNDS, Decided(ledger), rules)


@dataclass(frozen=True)
class Decided:
    ledger: LedgerRows

    @cached_property
    def of_branch(self) -> dict[int, list[BatchRow]]:
        """The batches as a learner on each branch saw them, up to the first that is missing."""
        seen: dict[int, list[BatchRow]] = {}
        for branch in self.ledger.branches:
            line: list[BatchRow] = []
            while (batch := self.ledger.batch_of(branch, len(line))) is not None:
                line.append(batch)
            seen[branch] = line
        return seen

    def before(self, batch: BatchRow) -> BatchRow | None:
        return self.ledger.batch_of(batch.branch, batch.b - 1) if batch.b else None

    def until(self, batch: BatchRow) -> list[BatchRow]:
        """The last batches of its line that count for its decision, itself the last."""
        return self.of_branch.get(batch.branch, [])[max(0, batch.b - LOOKED_AT) : batch.b + 1]

    @cached_property
    def _former(self) -> dict[tuple[int, tuple[int, ...]], list[BatchRow]]:
        alike: defaultdict[tuple[int, tuple[int, ...]], list[BatchRow]] = defaultdict(list)
        for batch in self.ledger.batches:
            alike[batch.b, batch.groups].append(batch)
        return alike

    def taken_over(self, batch: BatchRow) -> bool:
        """Whether the branch took it over as it was; the former one is checked itself."""
        return any(
            _about(each) == _about(batch)
            for each in self._former[batch.b, batch.groups]
            if each.released and each.branch < batch.branch and each.serial < batch.serial
        )

    @cached_property
    def stale(self) -> Counter[tuple[int | None, int | None]]:
        """Groups that were dropped as stale, by the branch on which they ended and the number of its batches then."""
        dropped = (group for group in self.ledger.groups.values() if group.reason == "stale")
        return Counter((group.ended_branch, group.ended_batch) for group in dropped)

    @cached_property
    def stale_at(self) -> dict[int | None, list[GroupRow]]:
        """The same groups by the number of batches that were fixed then."""
        found: defaultdict[int | None, list[GroupRow]] = defaultdict(list)
        for group in self.ledger.groups.values():
            if group.reason == "stale":
                found[group.ended_batch].append(group)
        return found

    @cached_property
    def first_uses(self) -> dict[int, int]:
        return {row["serial"]: row["first_uses"] for row in self.ledger.tables["batches"]}


def batches_have_the_bound_decided_before(decided: Decided, rules: Rules) -> Iterator[str]:
    """A batch has the bound that the configuration gives, or that the end of the batch before it decided."""
    for batch in decided.ledger.batches:
        expected = [r.after(decided.before(batch)) for r in rules]
        if batch.bound not in expected and not decided.taken_over(batch):
            yield f"{name(batch)} has the bound {batch.bound} on staleness; decided was {expected[-1]}"


def decisions_are_made_once_a_batch_ends(decided: Decided, rules: Rules) -> Iterator[str]:
    """Under `max_staleness: auto` the end of every batch decides the bound; a fixed bound is never decided."""
    for batch in decided.ledger.batches:
        is_decided = batch.decision is not None
        if batch.damaged:
            yield f"what {name(batch)} has decided is damaged: {batch.damaged}"
        elif batch.outcome is None and (is_decided or batch.measures is not None):
            yield f"{name(batch)} is open, and the bound after it is decided"
        elif batch.outcome is not None and all((r.auto is None) == is_decided for r in rules):
            yield f"{name(batch)} has {'a' if is_decided else 'no'} decision about the bound after it"


def decisions_follow_from_what_was_measured(decided: Decided, rules: Rules) -> Iterator[str]:
    """Each change of the bound is the one that the batches before it and their measures give, with its reason."""
    for batch in decided.ledger.batches:
        made = batch.decision
        if made is None or len(decided.until(batch)) == 0 or decided.taken_over(batch):
            continue
        expected = [target_after(auto, decided.until(batch)) for auto in {r.auto for r in rules} if auto is not None]
        if (made.target, made.why) not in expected and expected:
            target, why = expected[-1]
            yield f"{name(batch)} decides the bound {made.target} ({made.why}); measured, it is {target} ({why})"


def shares_of_stale_groups_are_counted(decided: Decided, _: Rules) -> Iterator[str]:
    """The share of stale groups that a decision rests on is that of the ledger."""
    for batch in decided.ledger.batches:
        if batch.measures is None or decided.taken_over(batch):
            continue
        share = stale_share(decided.stale[batch.branch, batch.b], decided.first_uses[batch.serial])
        if share != batch.measures.stale:
            yield f"{name(batch)} measured {batch.measures.stale:g} as the share of stale groups, which is {share:g}"


def smaller_bounds_wait_for_earlier_groups(decided: Decided, rules: Rules) -> Iterator[str]:
    """A smaller bound holds for new groups at once, and for batches once the groups admitted before are gone."""
    for batch in decided.ledger.batches:
        if batch.decision is None or decided.taken_over(batch):
            continue
        if not any(_fits(decided, batch, batch.decision, r.auto) for r in rules if r.auto is not None):
            made = batch.decision
            yield (
                f"{name(batch)} decides the bound {made.bound} for the next batch and {made.target} for groups from "
                f"{made.since} on, which does not follow from the bound {batch.bound} before"
            )
    yield from _too_early(decided)
    yield from _left_behind(decided, rules)


def _fits(decided: Decided, batch: BatchRow, made: Decision, auto: Auto) -> bool:
    line = decided.until(batch)
    earlier = None if len(line) < 2 else line[-2].decision
    since = 0 if earlier is None else earlier.since
    lowered = is_lowered(auto, line, made.target)
    issued_before = max(batch.groups, default=-1) < made.since <= len(decided.ledger.groups)
    if not (issued_before if lowered else made.since == since):
        return False
    return made.bound == made.target or made.target < made.bound == min(batch.bound, auto.limit)


def _too_early(decided: Decided) -> Iterator[str]:
    """Groups that were admitted under a larger bound, and taken by a batch when it did not hold any more."""
    for branch, line in decided.of_branch.items():
        since = 0
        for batch in line:
            early = [number for number in batch.groups if number < since]
            if batch.branch == branch and early:
                yield f"{name(batch)} holds group {early[0]}, and the bound was lowered as if it were gone"
            since = _gone_before(batch, since) if batch.branch == branch else 0  # a fork may have brought groups back


def _gone_before(batch: BatchRow, since: int) -> int:
    """Number of the first group that may be there when the bound behind `batch` holds; `since`: before that batch."""
    made = batch.decision
    if made is None:
        return 0
    return made.since if made.target == made.bound < batch.bound else since


def _left_behind(decided: Decided, rules: Rules) -> Iterator[str]:
    """Groups that were dropped because the bound was lowered while they were there."""
    ledger = decided.ledger
    for batch in ledger.line:
        made = batch.decision
        if made is None or made.bound >= batch.bound or made.target != made.bound or decided.taken_over(batch):
            continue
        for group in decided.stale_at.get(batch.b + 1, ()):
            if group.number < made.since and not any(_was_over(decided, batch, group, r) for r in rules):
                yield f"group {group.number} was within the bound, which {name(batch)} lowered as if it were gone"


def _was_over(decided: Decided, batch: BatchRow, group: GroupRow, r: Bounds) -> bool:
    """Whether it was too old before the batch ended, or on a branch that was left."""
    if over_age(decided.ledger, group, batch.version, batch.bound, r):
        return True
    for at in decided.ledger.batches:
        points = ((at.version, at.bound), (at.version_after, r.after(at)))
        if at.released and at.b == batch.b and any(over_age(decided.ledger, group, *p, r) for p in points):
            return True
    return False


def _about(batch: BatchRow) -> tuple[object, ...]:
    """What a branch takes over of a batch. The slots hold from another attempt on."""
    slots = None if batch.tuned is None else (batch.tuned.slots, batch.tuned.why)
    return batch.version, batch.outcome, batch.bound, batch.measures, batch.decision, slots


def name(batch: BatchRow) -> str:
    return f"batch {batch.b} of branch {batch.branch}"


BOUNDS: tuple[Check, ...] = (
    batches_have_the_bound_decided_before,
    decisions_are_made_once_a_batch_ends,
    decisions_follow_from_what_was_measured,
    shares_of_stale_groups_are_counted,
    smaller_bounds_wait_for_earlier_groups,
)
