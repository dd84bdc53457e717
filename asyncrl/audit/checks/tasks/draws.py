"""Each draw was made once, none was skipped, and each is of the task that the data seed gives."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise

from asyncrl.audit.ledger import LedgerRows
from asyncrl.audit.table import Check, apply

TaskOf = Callable[[int], tuple[str, int]]
"""Id of the task at an index, and the size of its group, recomputed from the data seed."""


def draws(ledger: LedgerRows, task_of: TaskOf) -> Iterator[str]:
    return apply(DRAWS, ledger, task_of)


def tasks_follow_from_the_seed(ledger: LedgerRows, task_of: TaskOf) -> Iterator[str]:
    """Every group is of the task that the data seed gives, and of the size that the source gives."""
    for group in ledger.groups.values():
        expected, size = task_of(group.task)
        if expected != group.task_id:
            yield f"group {group.number} (draw {group.draw}) is of task {group.task_id!r}; the seed says {expected!r}"
        if size != group.size:
            yield f"group {group.number} (task {group.task_id!r}) is of size {group.size}; its source says {size}"


def draws_are_made_once(ledger: LedgerRows, _: TaskOf) -> Iterator[str]:
    """No draw was made twice."""
    for draw, groups in _drawn(ledger).items():
        for one, other in pairwise(groups):
            yield f"draw {draw} was made twice: groups {one} and {other}"


def draws_reach_the_cursor(ledger: LedgerRows, _: TaskOf) -> Iterator[str]:
    """The draws are those below the cursor, without gaps."""
    drawn = _drawn(ledger)
    for draw in range(ledger.next_draw):
        if draw not in drawn:
            yield f"draw {draw} was skipped: the cursor stands at {ledger.next_draw} and no group has it"
    for draw in sorted(drawn):
        if draw >= ledger.next_draw:
            yield f"draw {draw} (group {drawn[draw][0]}) was made, and the cursor stands at {ledger.next_draw}"


def prompts_drawn_again_were_dropped(ledger: LedgerRows, _: TaskOf) -> Iterator[str]:
    """A prompt is drawn again only for an earlier group of the same draw, which was dropped."""
    for group in ledger.groups.values():
        if group.replaces is None:
            continue
        old = ledger.groups.get(group.replaces)
        if old is None:
            was = "is not in the ledger"
        elif old.number >= group.number:
            was = "is no earlier one"
        elif (old.state, old.draw) != ("dropped", group.draw):
            was = f"is {old.state}, of draw {old.draw}"
        else:
            continue
        yield f"group {group.number} (draw {group.draw}) was drawn again for group {group.replaces}, which {was}"


def prompts_are_drawn_again_once(ledger: LedgerRows, _: TaskOf) -> Iterator[str]:
    """The prompt of a dropped group is put back at most once."""
    for number, times in Counter(group.replaces for group in ledger.groups.values()).items():
        old = None if number is None else ledger.groups.get(number)
        if old is not None and times + old.put_back > 1:
            yield f"the prompt of group {old.number} was put back once and is to be drawn, or was drawn, twice"


def discarded_prompts_are_put_back(ledger: LedgerRows, _: TaskOf) -> Iterator[str]:
    """The prompt of a group dropped as discarded_branch is put back."""
    again = {group.replaces for group in ledger.groups.values()}
    for group in ledger.groups.values():
        if group.reason == "discarded_branch" and not group.put_back and group.number not in again:
            yield f"the prompt of group {group.number} (dropped: discarded_branch) was not put back"


def _drawn(ledger: LedgerRows) -> dict[int, list[int]]:
    """Numbers of the groups by draw, without those that were drawn again."""
    drawn: defaultdict[int, list[int]] = defaultdict(list)
    for group in ledger.groups.values():
        if group.replaces is None:
            drawn[group.draw].append(group.number)
    return drawn


DRAWS: tuple[Check, ...] = (
    tasks_follow_from_the_seed,
    draws_are_made_once,
    draws_reach_the_cursor,
    prompts_drawn_again_were_dropped,
    prompts_are_drawn_again_once,
    discarded_prompts_are_put_back,
)
