"""The curriculum as a witness: every draw is made again from the states, every state from the rewards."""

from __future__ import annotations

import bisect
import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from asyncrl.audit.ledger import CurriculumRow, GroupRow, LedgerRows
from asyncrl.audit.table import Check, apply
from asyncrl.buffer.tasks.drawing import encoded
from asyncrl.data.base import Curriculum, GroupResult


def curriculum(ledger: LedgerRows, again: Curriculum) -> Iterator[str]:
    """`again` is the run's curriculum, made again from the configuration; the checks restore states into it."""
    return apply(CURRICULUM, ledger, again)


def prompts_put_back_keep_their_task(ledger: LedgerRows, _: Curriculum) -> Iterator[str]:
    """A prompt that was put back is drawn again as the same task."""
    for group in ledger.groups.values():
        old = None if group.replaces is None else ledger.groups.get(group.replaces)
        if old is not None and old.task != group.task:
            yield f"group {group.number} is of task {group.task}; group {old.number} put back task {old.task}"


def states_are_recorded(ledger: LedgerRows, _: Curriculum) -> Iterator[str]:
    """Every state that drew or measured a group is in the ledger."""
    for what, groups in (("drawn", _drawn(ledger)), ("measured", _measured(ledger))):
        for serial in sorted(groups.keys() - ledger.curriculum.keys()):
            yield f"group {groups[serial][0].number} was {what} by state {serial}, which is not in the ledger"


def states_follow_from_rewards(ledger: LedgerRows, again: Curriculum) -> Iterator[str]:
    """Each state is what the curriculum makes of the state before it and the rewards since."""
    measured = _measured(ledger)
    for before, row in pairwise(row for row in ledger.curriculum.values() if not row.released):
        groups = measured[row.serial]
        # A state that cannot be read is reported by `draws_follow_from_states`.
        if not _readable(before) or any(_lost(ledger, group) for group in groups):
            continue
        if bare := [g.number for g in groups if not ledger.members.get(g.number)]:
            yield f"state {row.serial} measured the groups {bare}, of which no trajectory is stored"
            continue
        again.restore(json.loads(before.state))
        again.update(row.version, [_result(ledger, g) for g in groups if g.task not in ledger.added])
        if (expected := encoded(again.state())) != row.state:
            yield f"the state at batch {row.batch} is {row.state[:200]}; the rewards make it {expected[:200]}"


def draws_follow_from_states(ledger: LedgerRows, again: Curriculum) -> Iterator[str]:
    """Each draw is the task that the curriculum gives in its state, or an added row that was not drawn before."""
    drawn = _drawn(ledger)
    added = sorted(row.draw for row in ledger.added.values() if row.draw is not None)
    for row in ledger.curriculum.values():
        if not _readable(row):
            yield f"the state at batch {row.batch} is no JSON: {row.state[:200]}"
            continue
        again.restore(json.loads(row.state))
        for group in drawn[row.serial]:
            if group.task in ledger.added:
                yield from _added(ledger, group, row)
            elif (index := again.draw(group.draw - bisect.bisect(added, group.draw))) != group.task:
                yield f"draw {group.draw} (group {group.number}) is of task {group.task}; the curriculum says {index}"


def _added(ledger: LedgerRows, group: GroupRow, state: CurriculumRow) -> Iterator[str]:
    """Only the ledger has the added rows: what can be checked is that each was drawn once, after it was added."""
    row = ledger.added[group.task]
    if row.draw != group.draw:
        yield f"draw {group.draw} (group {group.number}) is of an added row, which is recorded as draw {row.draw}"
    elif row.batch > state.batch:
        yield f"draw {group.draw} (group {group.number}) is of a row that batch {row.batch} added; it came before it"


def _drawn(ledger: LedgerRows) -> defaultdict[int, list[GroupRow]]:
    """Groups by the state that drew them, without those that were drawn again."""
    groups: defaultdict[int, list[GroupRow]] = defaultdict(list)
    for group in ledger.groups.values():
        if group.replaces is None:
            groups[group.curriculum].append(group)
    return groups


def _measured(ledger: LedgerRows) -> defaultdict[int, list[GroupRow]]:
    """Groups by the first state that their rewards are in."""
    groups: defaultdict[int, list[GroupRow]] = defaultdict(list)
    for group in ledger.groups.values():
        if group.measured is not None:
            groups[group.measured].append(group)
    return groups


def _readable(row: CurriculumRow) -> bool:
    try:
        json.loads(row.state)
    except ValueError:
        return False
    return True


def _result(ledger: LedgerRows, group: GroupRow) -> GroupResult:
    rewards = tuple(row.reward for row in ledger.members.get(group.number, ()))
    return GroupResult(group.task, group.task_id, rewards)


def _lost(ledger: LedgerRows, group: GroupRow) -> bool:
    """Whether a power cut took one of its trajectories after it was measured, and the measured rewards with it."""
    attempts = (a for index in range(group.size) for a in ledger.attempts.get((group.number, index), ()))
    return any(a.ended == "lost" for a in attempts)


CURRICULUM: tuple[Check, ...] = (
    prompts_put_back_keep_their_task,
    states_are_recorded,
    states_follow_from_rewards,
    draws_follow_from_states,
)
