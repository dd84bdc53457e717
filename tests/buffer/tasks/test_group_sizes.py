"""Groups of several sizes: each is whole or not at all, places are counted in trajectories, the audit knows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.audit.checks.tasks.draws import draws
from asyncrl.audit.reading import read_ledger
from asyncrl.buffer.core import Buffer
from asyncrl.data.group_sizes import GroupSizes
from tests.buffer.fakes import FakeSource, equation, learner, open_buffer, play, reopen, step


class SizedSource(FakeSource):
    """Every third group has five trajectories, the others two."""

    group_sizes = (5,)

    def group_size(self, index: int) -> int | None:
        return 5 if index % 3 == 0 else None


def opened(folder: Path, **changes: int) -> Buffer:
    return open_buffer(folder, source=SizedSource(), **changes)


def test_tickets_batches_and_places_follow_each_groups_size(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    incarnation = learner(buffer)
    tickets = play(buffer)
    assert [sum(t.id.group == g for t in tickets) for g in range(4)] == [5, 2, 2, 5]
    assert {t.group_size for t in tickets if t.id.group == 3} == {5}
    assert buffer.tickets.places.taken() == 14
    assert step(buffer, incarnation, 0) == (0, 1)
    assert buffer.tickets.places.taken() == 7
    buffer = reopen(buffer, tmp_path, source=SizedSource())
    assert buffer.tickets.places.taken() == 7
    assert equation(buffer) == {"issued": 4, "trained": 2, "waiting": 2}


def test_a_group_is_issued_when_the_largest_has_a_place(tmp_path: Path) -> None:
    buffer = opened(tmp_path, capacity=10)
    learner(buffer)
    tickets, why = buffer.issue(0.0, "actor-0", (0, 0), 100)
    assert len(tickets) == 7
    assert why == "capacity: 7 of 10 trajectories are in flight or waiting"


@pytest.mark.parametrize(("change", "expected"), [("", []), ("3", ["group 0 (task 'task-0') is of size 3"])])
def test_the_audit_knows_the_sizes(tmp_path: Path, change: str, expected: list[str]) -> None:
    buffer = opened(tmp_path)
    learner(buffer)
    play(buffer)
    if change:
        buffer.database.write(f"UPDATE groups SET size = {change} WHERE number = 0")
    buffer.commit(0)
    source = SizedSource()
    sizes = GroupSizes(source, 2)
    found = list(draws(read_ledger(tmp_path), lambda i: (source.task(i)["id"], sizes.of(i))))
    assert [line.partition(";")[0] for line in found] == expected
