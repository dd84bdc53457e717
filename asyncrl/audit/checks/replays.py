"""Used groups: what each batch got beside its new ones is drawn again, and why others ended before another use.

Which used groups a batch could have is derived from the batches before it, as a learner on its branch saw them: groups
of applied batches that had a use left, were within the bound, and had not ended. `retired` says when a waiting group
ended; a fork that released a batch with the group brought it back.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from random import Random
from typing import Any

from asyncrl.audit.checks.drops import as_judged, over_age, points
from asyncrl.audit.ledger import BatchRow, GroupRow, LedgerRows
from asyncrl.audit.table import Check, apply
from asyncrl.audit.witnesses import Bounds
from asyncrl.buffer.ledger.group import Group
from asyncrl.buffer.ledger.records import NOTHING, Draw
from asyncrl.buffer.replaying import draw, seed_of

Rules = Sequence[Bounds]
_CLOSE = 1e-9
"""Relative: powers and logarithms of another machine may differ in the last digits."""


def replays(ledger: LedgerRows, rules: Rules) -> Iterator[str]:
    """`rules` are those of every configuration that the run had."""
    return apply(REPLAYS, _Used(ledger), rules)


@dataclass(frozen=True)
class _Used:
    """Which groups had been used, and waited for another use, at any point of the history."""

    ledger: LedgerRows

    @cached_property
    def ends(self) -> dict[int, list[tuple[int, int, float]]]:
        """Branch, batch and serial of each end while it waited, by group."""
        ends: defaultdict[int, list[tuple[int, int, float]]] = defaultdict(list)
        for row in self.ledger.tables["retired"]:
            ends[row["grp"]].append((row["branch"], row["batch"], row["serial"]))
        return ends

    @cached_property
    def _back(self) -> dict[int, set[int]]:
        """By branch: the groups in the batches that its beginning released."""
        forks = {row.branch: row.fork_batch for row in self.ledger.branches.values() if row.parent is not None}
        back: dict[int, set[int]] = {branch: set() for branch in forks}
        for batch in self.ledger.batches:
            left = (branch for branch, b in forks.items() if branch > batch.branch and b <= batch.b)
            if (first := min(left, default=None)) is not None:
                back[first].update(batch.groups)
        return back

    def ended(self, number: int, before: tuple[int, int, float]) -> bool:
        """Whether a waiting group had ended before this point, and no fork had brought it back."""
        last = max((end for end in self.ends.get(number, ()) if end < before), default=None)
        if last is None:
            return False
        return not any(number in self._back.get(branch, ()) for branch in range(last[0] + 1, before[0] + 1))

    def brought_back(self, number: int, branch: int, b: int) -> bool:
        """Whether this branch begins at batch b and released a batch that held the group."""
        return self.ledger.branches[branch].fork_batch == b and number in self._back.get(branch, ())

    @cached_property
    def lost(self) -> set[int]:
        """Groups of which a power cut took a trajectory."""
        attempts = self.ledger.attempts
        return {number for (number, _), of_it in attempts.items() if any(a.ended == "lost" for a in of_it)}

    def other_then(self, number: int, branch: int) -> bool:
        """Whether it may have had other trajectories on this branch: a later one brought it back as if it had not been
        used, and a power cut then took some of it, which were generated again."""
        return number in self.lost and any(number in back for later, back in self._back.items() if later > branch)

    def known(self, batch: BatchRow) -> bool:
        """Whether the used groups of that time have the trajectories that they had."""
        changed = (n for n in self.lost if self.other_then(n, batch.branch))
        return not any(self.was_used(n, batch.branch, batch.b) for n in changed)

    def version(self, branch: int, b: int) -> int:
        """The learner's before batch b."""
        before = self.ledger.batch_of(branch, b - 1) if b > 0 else None
        return 0 if before is None else before.version_after

    def waiting(self, point: tuple[int, int, float], r: Bounds) -> dict[int, int]:
        """Uses of each used group, by number, that waited within the bound before batch `point[1]` was fixed.

        A group that is within the bound was only used in batches that are as well: nobody trains a token of the future.
        """
        ledger, (branch, b, _) = self.ledger, point
        bound = r.after(ledger.batch_of(branch, b - 1) if b else None)
        version, uses, refused, last = self.version(branch, b), Counter[int](), set[int](), dict[int, BatchRow]()
        for earlier in range(b - 1, -1, -1):
            batch = ledger.batch_of(branch, earlier)
            if batch is None or batch.version < version - bound:
                break
            for number in batch.groups:
                last.setdefault(number, batch)
            (uses if batch.outcome == "applied" else refused).update(batch.groups)
        found = {}
        for number in sorted(uses):
            group = ledger.groups.get(number)
            left = group is not None and uses[number] < r.max_uses and not self._last_use(group, last[number])
            if (
                left
                and number not in refused
                and not self.ended(number, point)
                and self._within(number, (version, bound), r)
            ):
                found[number] = uses[number]
        return found

    def _last_use(self, group: GroupRow, batch: BatchRow) -> bool:
        """Whether it ended with this batch, under an earlier configuration perhaps; a later branch may have taken the
        batch over, and its end is then that of the other one."""
        after = batch.b + 1
        at_once = (end for _, end, _ in self.ends.get(group.number, ()))
        ended = group.state == "trained" and group.ended_batch == after and after not in at_once
        return ended and self._holds_last.get(group.number) is batch

    @cached_property
    def _holds_last(self) -> dict[int, BatchRow]:
        """The last batch that held a group, by its number, on any branch."""
        in_order = sorted(self.ledger.batches, key=lambda batch: batch.serial)
        return {number: batch for batch in in_order for number in batch.groups}

    def _within(self, number: int, point: tuple[int, int], r: Bounds) -> bool:
        """Whether it was complete, and not too old at this version under this bound."""
        group, members = self.ledger.groups[number], self.ledger.members.get(number, ())
        if len(members) < group.size or any(row.newest > point[0] for row in members):
            return False
        return not over_age(self.ledger, group, *point, r)

    def age(self, number: int) -> tuple[int, int]:
        """Oldest version and number, by which used groups yield."""
        return min((row.oldest for row in self.ledger.members.get(number, ())), default=0), number

    def drawn_again(self, batch: BatchRow, r: Bounds) -> Draw:
        """What the batch should have got. Raises ValueError for a priority that cannot be used."""
        if r.replay is None:
            return NOTHING
        candidates = []
        for number, uses in self.waiting((batch.branch, batch.b, math.inf), r).items():
            if (judged := self._judged(number)) is not None:
                judged.uses, judged.weight = uses, self.ledger.groups[number].weight
                candidates.append(judged)
        return draw(r.replay, candidates, batch.version, Random(seed_of(r.data_seed, batch.branch, batch.b)))

    @cached_property
    def _judged(self) -> Any:
        @lru_cache(4096)
        def judged(number: int) -> Group | None:
            return as_judged(self.ledger, self.ledger.groups[number])

        return judged

    @cached_property
    def _applied(self) -> dict[int, list[BatchRow]]:
        """The applied batches that held a group, by its number."""
        applied: defaultdict[int, list[BatchRow]] = defaultdict(list)
        for batch in self.ledger.batches:
            for number in batch.groups if batch.outcome == "applied" else ():
                applied[number].append(batch)
        return applied

    def was_used(self, number: int, branch: int, b: int) -> bool:
        """Whether an applied batch before batch b held it, as a learner on `branch` saw it."""
        held = self._applied.get(number, ())
        return any(batch.b < b and self.ledger.batch_of(branch, batch.b) is batch for batch in held)

    def used_before(self, batch: BatchRow) -> set[int]:
        """Its groups that an applied batch before it held."""
        return {number for number in batch.groups if self.was_used(number, batch.branch, batch.b)}

    @cached_property
    def by_number(self) -> dict[int, list[BatchRow]]:
        """The batches of each number, on all branches."""
        batches: defaultdict[int, list[BatchRow]] = defaultdict(list)
        for batch in self.ledger.batches:
            batches[batch.b].append(batch)
        return batches


# --- what batches got -------------------------------------------------------------------------------------------------


def draws_are_of_their_batch(used: _Used, _: Rules) -> Iterator[str]:
    """A replayed group is in its batch, and was used before."""
    batches = {batch.serial: batch for batch in used.ledger.batches}
    for row in used.ledger.tables["replays"]:
        batch = batches.get(row["serial"])
        if batch is None or row["grp"] not in batch.groups:
            yield f"group {row['grp']} is replayed in batch serial {row['serial']}, which does not hold it"
    for batch in used.ledger.batches:
        if batch.replay.drawn and (new := set(batch.replay.numbers) - used.used_before(batch)):
            yield f"{_name(batch)} replays groups {sorted(new)}, which were not used before"


def batches_replay_what_the_seed_draws(used: _Used, rules: Rules) -> Iterator[str]:
    """The used groups that a batch got are drawn again: the same candidates, chances, weights; its others are new."""
    for batch in used.ledger.batches:
        if _done_again(used, batch) or not used.known(batch):
            continue
        expected = [used.drawn_again(batch, r) for r in rules]
        fits = [r for r, again in zip(rules, expected, strict=True) if _alike(again, batch.replay)]
        if not fits:
            yield f"{_name(batch)} replays {_said(batch.replay)}; the seed draws {_said(expected[-1])}"
        elif all(r.replay is not None for r in fits) and (old := used.used_before(batch) - set(batch.replay.numbers)):
            yield f"{_name(batch)} takes groups {sorted(old)} for new, and they were used before"


def _done_again(used: _Used, batch: BatchRow) -> bool:
    """Whether it is a batch that a branch took over as it was; the former one is checked itself."""
    return any(
        (former.b, former.version, former.groups, former.replay) == (batch.b, batch.version, batch.groups, batch.replay)
        for former in used.by_number[batch.b]
        if former.released and former.branch < batch.branch and former.serial < batch.serial
    )


def _alike(one: Draw, other: Draw) -> bool:
    return (one.candidates, one.numbers) == (other.candidates, other.numbers) and all(
        math.isclose(a.chance, b.chance, rel_tol=_CLOSE) and math.isclose(a.weight, b.weight, rel_tol=_CLOSE)
        for a, b in zip(one.drawn, other.drawn, strict=True)
    )


def _said(draw: Draw) -> str:
    drawn = [f"group {one.group} (chance {one.chance:.6g}, weight {one.weight:.6g})" for one in draw.drawn]
    return f"{', '.join(drawn) or 'nothing'} of {draw.candidates} candidates"


# --- what ended before another use ------------------------------------------------------------------------------------


def ends_are_of_used_groups(used: _Used, rules: Rules) -> Iterator[str]:
    """A group that ended while it waited for another use had been used, had not ended before, and has ended now."""
    ledger = used.ledger
    for row in ledger.tables["retired"]:
        number, branch, b = row["grp"], row["branch"], row["batch"]
        group, fork, now = (
            ledger.groups.get(number),
            ledger.branches.get(branch),
            (max(ledger.branches, default=0) + 1, 0, 0),
        )
        name = f"group {number} is recorded as {row['why']} on branch {branch} when {b} batches were fixed"
        if group is None or fork is None or b < fork.fork_batch or (b > 0 and ledger.batch_of(branch, b - 1) is None):
            yield f"{name}, and there is no such group or batch"
        elif used.ended(number, (branch, b, row["serial"])) or not used.was_used(number, branch, b):
            yield f"{name}, and did not wait for another use"
        elif max(used.ends[number])[2] == row["serial"] and used.ended(number, now) and group.ended_batch != b:
            yield f"{name}, and is {group.state}, ended at batch {group.ended_batch}"


def ends_have_their_reason(used: _Used, rules: Rules) -> Iterator[str]:
    """It was too old, its bytes are gone, or it was the oldest used one when one had to yield under `buffer.replay`."""
    for row in used.ledger.tables["retired"]:
        group = used.ledger.groups.get(row["grp"])
        if group is None or used.other_then(group.number, row["branch"]):
            continue
        if not any(_reason_holds(used, row, group, r) for r in rules):
            yield f"group {group.number} is recorded as {row['why']} at batch {row['batch']}, and that does not follow"


def _reason_holds(used: _Used, row: dict[str, Any], group: GroupRow, r: Bounds) -> bool:
    if row["why"] == "stale":
        then = points(used.ledger, row["branch"], row["batch"], r)
        return any(over_age(used.ledger, group, *point, r) for point in then)
    if row["why"] == "no_payload":
        return not group.payload and (
            group.number in used.lost or used.brought_back(group.number, row["branch"], row["batch"])
        )
    if row["why"] != "yielded" or r.replay is None:
        return False
    point = (row["branch"], row["batch"], row["serial"])
    open_then = used.ledger.batch_of(row["branch"], row["batch"] - 1)
    assigned = () if open_then is None else open_then.groups
    older = (n for n in used.waiting(point, r) if used.age(n) < used.age(group.number) and n not in assigned)
    return next(older, None) is None


def _name(batch: BatchRow) -> str:
    return f"batch {batch.b} of branch {batch.branch}"


REPLAYS: tuple[Check, ...] = (
    draws_are_of_their_batch,
    batches_replay_what_the_seed_draws,
    ends_are_of_used_groups,
    ends_have_their_reason,
)
