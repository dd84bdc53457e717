"""Every end of a group is derived again: its reason, when it came, and what became of its prompt and its weight.

When: the ledger keeps for each group the number of batches that were fixed when it ended (`ended_batch`). With a branch
this gives the version that the learner had at most. A rule of the configuration is the one of `config.yaml`, or of an
earlier configuration of the run (`configs/`), if it was resumed with another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from asyncrl.audit.ledger import BatchRow, BranchRow, GroupRow, LedgerRows
from asyncrl.audit.table import Check, apply
from asyncrl.audit.witnesses import Bounds
from asyncrl.buffer.ledger.group import Group, Received
from asyncrl.buffer.ledger.storage.payloads import Location

Rules = Sequence[Bounds]
_SKIPPED = ("guard", "poison")
_GIVEN_UP = ("lapsed", "released", "failed", "revoked", "late")
"""How attempts end whose ticket is free again; a put that comes after it makes it `late`."""


def drops(ledger: LedgerRows, rules: Rules) -> Iterator[str]:
    """`rules` are those of every configuration that the run had."""
    return apply(DROPS, ledger, rules)


# --- when -------------------------------------------------------------------------------------------------------------


def ended_groups_say_when(ledger: LedgerRows, _: Rules) -> Iterator[str]:
    """A group has a batch at which it ended if, and only if, it has ended; a filtered one was then being filled in."""
    for group in ledger.groups.values():
        ended = group.state in ("trained", "dropped")
        if (group.ended_batch is not None) != ended or (group.ended_branch is not None) != ended:
            yield f"{_name(group)}, and the batch at which it ended is {group.ended_batch}"
        elif group.filling != (group.ended_batch if group.reason == "filtered" else None):
            yield f"{_name(group)} at batch {group.ended_batch}, and is recorded as filtered for batch {group.filling}"


def groups_ended_on_a_branch_that_was_there(ledger: LedgerRows, _: Rules) -> Iterator[str]:
    """A group ended on its branch or a later one, at a batch of that, and with the batch that ended it."""
    last, yielded = _last_batch(ledger), {(row["grp"], row["batch"], row["branch"]) for row in ledger.tables["retired"]}
    for group in (group for group in ledger.groups.values() if group.ended_batch is not None):
        on, at = ledger.branches.get(group.ended_branch or 0), group.ended_batch or 0
        there = on is not None and group.branch <= on.branch == group.ended_branch and _reached(ledger, on, at)
        batch = None if (group.number, at, group.ended_branch) in yielded else last.get(group.number)
        ended_by = None if batch is None else batch.branch
        if not there or group.ended_branch != _ended_on(ledger, group, ended_by):
            yield f"{_name(group)} at batch {at} of branch {group.ended_branch}, which cannot be where it ended"


def _ended_on(ledger: LedgerRows, group: GroupRow, ended_by: int | None) -> int | None:
    """The branch on which a group must have ended; its own word where nothing else says it. `ended_by`: the branch of
    the batch that can have ended it."""
    if group.reason == "filtered":
        return _judged_on(ledger, group)
    by_a_batch = group.state == "trained" or group.reason in _SKIPPED
    return ended_by if by_a_batch and ended_by is not None else group.ended_branch


def _reached(ledger: LedgerRows, branch: BranchRow, fixed: int) -> bool:
    """Whether so many batches were fixed on a branch at some time."""
    return branch.fork_batch == fixed or ledger.fixed_on(branch.branch, fixed - 1) is not None


# --- why --------------------------------------------------------------------------------------------------------------


def stale_groups_were_too_old(ledger: LedgerRows, rules: Rules) -> Iterator[str]:
    """A group dropped as stale was past the bound, by its stored versions, when it was dropped."""
    for group in _dropped(ledger, "stale"):
        if not any(over_age(ledger, group, *point, r) for r in rules for point in _points(ledger, group, r)):
            oldest = min((row.oldest for row in ledger.members.get(group.number, ())), default=None)
            yield (
                f"{_name(group)}, and was within the bound: its oldest stored version is {oldest}, the learner's was "
                f"at most {_version(ledger, group)} at batch {group.ended_batch}"
            )


def filtered_groups_are_rejected(ledger: LedgerRows, rules: Rules) -> Iterator[str]:
    """A group dropped as filtered is complete, and a filter of the configuration rejects it."""
    for group in _dropped(ledger, "filtered"):
        judged = as_judged(ledger, group)
        if judged is None:
            yield f"{_name(group)}, and not all of its trajectories are stored"
        elif not any(_rejects(judged, r) for r in rules):
            yield f"{_name(group)}, and no filter in buffer.filters rejects its rewards {list(judged.rewards)}"


def filtered_groups_fit_the_allowance(ledger: LedgerRows, rules: Rules) -> Iterator[str]:
    """While one batch is filled, filters drop no more groups than `buffer.filter_max_ratio` allows."""
    for (branch, b), count in _filtered(ledger).items():
        if not any(count - 1 < r.filter_max_ratio * r.groups_per_step for r in rules):
            yield f"{count} groups are dropped: filtered while batch {b} of branch {branch} was filled, above the limit"


def failed_groups_have_failed_attempts(ledger: LedgerRows, rules: Rules) -> Iterator[str]:
    """A group dropped as env_error has a ticket that failed more often than `env.retries`, or lost its scorer."""
    for group in _dropped(ledger, "env_error"):
        if not any(_failed(ledger, group, r) or _lost_its_scorer(ledger, group, r) for r in rules):
            yield f"{_name(group)}, and no ticket of it has more failed attempts than env.retries allows"


def awaited_groups_were_not_there(ledger: LedgerRows, rules: Rules) -> Iterator[str]:
    """A group dropped as wait_deadline was awaited under `over_age: wait`, was played, and was not usable in time."""
    for group in _dropped(ledger, "wait_deadline"):
        if not any(r.over_age == "wait" for r in rules):
            yield f"{_name(group)}, and buffer.over_age is {rules[-1].over_age}, which waits for no group"
        elif not any(ledger.attempts.get((group.number, index)) for index in range(group.size)):
            yield f"{_name(group)}, and no ticket of it was issued, so that no deadline was set"
        elif (version := _version(ledger, group)) is None or not _unusable(ledger, group, version):
            yield f"{_name(group)}, and was complete, so that batch {group.ended_batch} could have taken it"


def skipped_groups_ended_with_their_batch(ledger: LedgerRows, _: Rules) -> Iterator[str]:
    """A group dropped as guard or poison ended with a batch that has this outcome and holds it."""
    ended = {(batch.b + 1, n): batch.outcome for batch in ledger.line for n in batch.groups}
    for group in (g for reason in _SKIPPED for g in _dropped(ledger, reason)):
        outcome = ended.get((group.ended_batch or 0, group.number), "none that holds it")
        if outcome != group.reason:
            yield f"{_name(group)} at batch {group.ended_batch}, and the batch before that is {outcome}"


def discarded_groups_were_left_behind(ledger: LedgerRows, _: Rules) -> Iterator[str]:
    """A group dropped as discarded_branch met a later branch that could not have produced it."""
    for group in _dropped(ledger, "discarded_branch"):
        members = ledger.members.get(group.number, ())
        newest = max((row.newest for row in members), default=-1)
        fork = ledger.branches.get(group.ended_branch or 0)
        begun = fork is not None and fork.branch > group.branch and fork.fork_batch == group.ended_batch
        if not (fork and begun and (newest > fork.fork_version or not group.payload)):
            yield f"{_name(group)} at batch {group.ended_batch}, and no later branch that begins there had to leave it"


def trained_groups_have_no_use_left(ledger: LedgerRows, rules: Rules) -> Iterator[str]:
    """A group that ended as trained had all its uses, or was refused, or ended while it waited for another one."""
    last = _last_batch(ledger)
    waited = {(row["grp"], row["batch"]) for row in ledger.tables["retired"]}  # checked by replays.py
    for group in (g for g in ledger.groups.values() if g.state == "trained" and g.number in last):
        batch = last[group.number]
        over = batch.outcome in _SKIPPED or any(group.uses >= r.max_uses for r in rules)
        if not (over and group.ended_batch == batch.b + 1) and (group.number, group.ended_batch) not in waited:
            yield f"{_name(group)} at batch {group.ended_batch}, after {group.uses} uses, and could be used again"


def waiting_groups_have_a_use_left(ledger: LedgerRows, rules: Rules) -> Iterator[str]:
    """A group that waits was used less often than `buffer.max_uses`."""
    for group in ledger.groups.values():
        if group.state == "waiting" and all(group.uses >= r.max_uses for r in rules):
            yield f"{_name(group)}, and was used {group.uses} times: no further use is possible"


# --- what follows from it ---------------------------------------------------------------------------------------------


def prompts_go_back_as_the_reason_says(ledger: LedgerRows, rules: Rules) -> Iterator[str]:
    """The prompt of a group is put back if, and only if, its reason asks for that (`buffer.requeue`)."""
    again = {group.replaces for group in ledger.groups.values()}
    for group in ledger.groups.values():
        back = group.put_back or group.number in again
        if not any(back in _puts_back(ledger, group, r) for r in rules):
            yield f"{_name(group)}, and its prompt was {'put back' if back else 'not put back'}"


def weights_follow_from_filters(ledger: LedgerRows, rules: Rules) -> Iterator[str]:
    """The weight of a group is 0 if a filter rejects it and its allowance was used up; otherwise it is 1."""
    most: Counter[int] = Counter()
    for (branch, _), count in _filtered(ledger).items():
        most[branch] = max(most[branch], count)
    for group in ledger.groups.values():
        if _lost(ledger, group):
            continue  # it was judged with the trajectory that the disk lost
        judged = as_judged(ledger, group)
        if not any(_weight_fits(group, judged, most[_judged_on(ledger, group)], r) for r in rules):
            yield f"{_name(group)} with weight {group.weight:g}, which does not follow from buffer.filters"


def _weight_fits(group: GroupRow, judged: Group | None, filtered: int, r: Bounds) -> bool:
    """`filtered`: the most groups that were filtered while one batch was filled, on the branch where it was judged."""
    rejected = judged is not None and _rejects(judged, r)
    if group.weight == 0:
        limit = r.filter_max_ratio * r.groups_per_step
        return rejected and filtered >= limit and group.reason != "filtered" and not r.starved_ends
    # One that is too old when it becomes complete is not judged.
    return group.weight == 1 and (not rejected or group.reason in ("stale", "filtered") or r.starved_ends)


def _puts_back(ledger: LedgerRows, group: GroupRow, r: Bounds) -> tuple[bool, ...]:
    """Whether the prompt goes back. Either may be where a late attempt had failed, had lapsed or was void before."""
    if group.reason in ("stale", "wait_deadline"):
        return (r.requeue,)
    if group.reason == "env_error":
        failed, surely = _failed(ledger, group, r), _failed(ledger, group, r, ("failed",))
        return (False, True) if failed and not surely and _lost_its_scorer(ledger, group, r) else (not failed,)
    return (group.reason == "discarded_branch",)


def _filtered(ledger: LedgerRows) -> Counter[tuple[int, int | None]]:
    """How many groups were filtered, by branch and the batch that was being filled."""
    return Counter((_judged_on(ledger, g), g.filling) for g in _dropped(ledger, "filtered"))


def _judged_on(ledger: LedgerRows, group: GroupRow) -> int:
    """The branch on which a group was complete: the one on which its last trajectory was lent."""
    return max((row.branch or 0 for row in ledger.members.get(group.number, ())), default=group.branch)


def _dropped(ledger: LedgerRows, reason: str) -> list[GroupRow]:
    return [g for g in ledger.groups.values() if g.state == "dropped" and g.reason == reason]


def _last_batch(ledger: LedgerRows) -> dict[int, BatchRow]:
    return {number: batch for batch in ledger.line for number in batch.groups}


def _version(ledger: LedgerRows, group: GroupRow) -> int | None:
    """The highest version that the learner can have had when the group ended; None: the ledger says no such place.

    While it redoes recorded batches its version is lower; a group too old for the lower one is too old for the higher.
    """
    branch, end = ledger.branches.get(group.ended_branch or 0), group.ended_batch
    if branch is None or end is None:
        return None
    batch = ledger.fixed_on(branch.branch, end - 1)
    return branch.fork_version if end == branch.fork_batch else None if batch is None else batch.version_after


def _points(ledger: LedgerRows, group: GroupRow, r: Bounds) -> Iterator[tuple[int, int]]:
    """The version of `_version` with the bound on staleness then. Both change when a batch ends: before that, both may
    have been smaller."""
    branch, end = group.ended_branch, group.ended_batch
    if end is not None and branch in ledger.branches and end >= ledger.branches[branch].fork_batch:
        yield from points(ledger, branch, end, r)


def points(ledger: LedgerRows, branch: int, fixed: int, r: Bounds) -> Iterator[tuple[int, int]]:
    """The versions of a learner on this branch while so many batches were fixed, each with the bound then."""
    last = ledger.batch_of(branch, fixed - 1) if fixed else None
    if last is None:
        if not fixed:
            yield 0, r.after(None)
        return
    yield last.version_after, r.after(last)
    if r.auto is not None:
        yield last.version, last.bound


def over_age(ledger: LedgerRows, group: GroupRow, version: int, bound: int, r: Bounds) -> bool:
    members = ledger.members.get(group.number, ())
    if not members or version - min(row.oldest for row in members) <= bound:
        return False
    if r.over_age != "mask":
        return True
    kept = sum(row.tokens_since(version - bound) for row in members)
    enough = kept and kept >= r.mask_min_kept * sum(row.policy_tokens for row in members)
    return len(members) == group.size and not enough


def _unusable(ledger: LedgerRows, group: GroupRow, version: int) -> bool:
    """Incomplete, or ahead of the learner."""
    members = ledger.members.get(group.number, ())
    return len(members) < group.size or max(row.newest for row in members) > version


def _failed(ledger: LedgerRows, group: GroupRow, r: Bounds, ends: Sequence[str] = ("failed", "late")) -> bool:
    """Whether a ticket that brought nothing failed more often than it may be tried again. A put made it `late`."""
    for index in range(group.size):
        ended = Counter(a.ended for a in ledger.attempts.get((group.number, index), ()))
        stored = (group.number, index) in ledger.trajectories
        if not stored and sum(ended[how] for how in ends) > r.env_retries:
            return True
    return False


def _lost_its_scorer(ledger: LedgerRows, group: GroupRow, r: Bounds) -> bool:
    """Whether a group that is scored as a whole was stored in part when a ticket of it came back."""
    attempts = [a for index in range(group.size) for a in ledger.attempts.get((group.number, index), ())]
    part = 0 < len(ledger.members.get(group.number, ())) < group.size
    return r.group_scored and part and any(a.ended in _GIVEN_UP for a in attempts)


def _lost(ledger: LedgerRows, group: GroupRow) -> bool:
    attempts = (a for index in range(group.size) for a in ledger.attempts.get((group.number, index), ()))
    return any(a.ended == "lost" for a in attempts)


def _rejects(judged: Group, r: Bounds) -> bool:
    return any(rejects(judged) for rejects in r.filters)


def as_judged(ledger: LedgerRows, group: GroupRow) -> Group | None:
    """The group as filters saw it; None if it was never complete."""
    members = ledger.members.get(group.number, [])
    if [row.index for row in members] != list(range(group.size)) or not all(row.versions for row in members):
        return None
    judged = Group(group.number, group.branch, group.draw, group.task_id, group.size, "waiting", group.replaces)
    judged.task, judged.curriculum = group.task, group.curriculum
    for row in members:
        location = Location(row.segment, row.start, row.bytes, row.checksum)
        about = (row.tokens, row.turns, row.reward, row.env, row.stop_reason)
        judged.store(row.index, Received(row.attempt, row.actor, row.digest, location, row.versions, *about))
    return judged


def _name(group: GroupRow) -> str:
    return f"group {group.number} is {group.state if group.reason is None else f'{group.state}: {group.reason}'}"


DROPS: tuple[Check, ...] = (
    ended_groups_say_when,
    groups_ended_on_a_branch_that_was_there,
    stale_groups_were_too_old,
    filtered_groups_are_rejected,
    filtered_groups_fit_the_allowance,
    failed_groups_have_failed_attempts,
    awaited_groups_were_not_there,
    skipped_groups_ended_with_their_batch,
    discarded_groups_were_left_behind,
    trained_groups_have_no_use_left,
    waiting_groups_have_a_use_left,
    prompts_go_back_as_the_reason_says,
    weights_follow_from_filters,
)
