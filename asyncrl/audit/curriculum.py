"""The curriculum as a witness: every draw made again from the states, every state from the rewards."""

from __future__ import annotations

import bisect
import json
from collections import defaultdict
from collections.abc import Iterator

from asyncrl.audit.ledger import CurriculumRow, GroupRow, LedgerRows
from asyncrl.buffer.tasks.drawing import encoded
from asyncrl.data.base import Curriculum, GroupResult


def curriculum(ledger: LedgerRows, made_again: Curriculum) -> Iterator[str]:
    """A sentence for each draw that another task should have been, and each state that does not follow."""
    drawn: defaultdict[int, list[GroupRow]] = defaultdict(list)
    measured: defaultdict[int, list[GroupRow]] = defaultdict(list)
    for group in ledger.groups.values():
        if group.replaces is None:
            drawn[group.curriculum].append(group)
        elif (old := ledger.groups.get(group.replaces)) is not None and old.task != group.task:
            yield f"group {group.number} is of task {group.task}; group {old.number} put back task {old.task}"
        if group.measured is not None:
            measured[group.measured].append(group)
    for serial in sorted(drawn.keys() - ledger.curriculum.keys()):
        yield f"group {drawn[serial][0].number} was drawn by state {serial}, which is not in the ledger"
    for serial in sorted(measured.keys() - ledger.curriculum.keys()):
        yield f"group {measured[serial][0].number} was measured by state {serial}, which is not in the ledger"
    added = sorted(row.draw for row in ledger.added.values() if row.draw is not None)
    before = None
    for row in ledger.curriculum.values():
        if not row.released:
            known = measured[row.serial]
            if before is not None and not any(_lost(ledger, group) for group in known):
                made_again.restore(json.loads(before.state))
                made_again.update(row.version, [_result(ledger, g) for g in known if g.task not in ledger.added])
                if (expected := encoded(made_again.state())) != row.state:
                    yield f"the state at batch {row.batch} is {row.state[:200]}; the rewards make it {expected[:200]}"
            before = row
        made_again.restore(json.loads(row.state))
        for group in drawn[row.serial]:
            if group.task in ledger.added:
                yield from _added(ledger, group, row)
            elif (index := made_again.draw(group.draw - bisect.bisect(added, group.draw))) != group.task:
                yield f"draw {group.draw} (group {group.number}) is of task {group.task}; the curriculum says {index}"


def _added(ledger: LedgerRows, group: GroupRow, state: CurriculumRow) -> Iterator[str]:
    """Rows that were added are the ledger's own: what can be checked is that each was drawn once, when it was there."""
    row = ledger.added[group.task]
    if row.draw != group.draw:
        yield f"draw {group.draw} (group {group.number}) is of an added row, which is recorded as draw {row.draw}"
    elif row.batch > state.batch:
        yield f"draw {group.draw} (group {group.number}) is of a row that batch {row.batch} added; it came before it"


def _result(ledger: LedgerRows, group: GroupRow) -> GroupResult:
    rewards = tuple(row.reward for row in ledger.members.get(group.number, ()))
    return GroupResult(group.task, group.task_id, rewards)


def _lost(ledger: LedgerRows, group: GroupRow) -> bool:
    """A power cut took one of its trajectories after it was measured: what was measured is gone."""
    attempts = (ledger.attempts.get((group.number, index), ()) for index in range(group.size))
    return any(a.ended == "lost" for found in attempts for a in found)
