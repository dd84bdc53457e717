"""Which ticket that no actor holds is issued next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer.rules import Refused
from asyncrl.trajectory import Ticket
from tests.buffer.fakes import learner, open_buffer, put, trajectory


def test_tickets_of_a_host_that_died_are_issued_again_at_a_bounded_rate_beside_new_ones(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, max_staleness=20, capacity=1000)
    learner(buffer)
    first = buffer.issue(0, "a", (0, 0), 40)[0]
    buffer.joined("a")  # it died, and is there again

    def again(now: float) -> list[int]:
        """Places in `first` of what is issued again."""
        issued: list[Ticket] = buffer.issue(now, "b", (0, 0), 24)[0]
        ids = [t.id for t in first]
        return [ids.index(t.id) for t in issued if t.attempt > 0]

    assert again(0) == [*range(16)]
    assert again(0) == []
    assert again(0.5) == [*range(16, 24)]
    assert buffer.tickets.queue.reissued == 24


@pytest.mark.parametrize(("over_age", "expected"), [("drop", (0, 0)), ("wait", (1, 1))])
def test_under_wait_the_earliest_deadline_comes_first(tmp_path: Path, over_age: str, expected: Any) -> None:
    buffer = open_buffer(tmp_path, over_age=over_age)
    learner(buffer)
    tickets = buffer.issue(0, "a", (0, 0), 4)[0]
    assert put(buffer, trajectory(tickets[2])) == "stored"
    buffer.release("a", [(t.id, t.attempt) for t in tickets if t is not tickets[2]])
    (ticket,) = buffer.issue(0, "b", (0, 0), 1)[0]
    assert (ticket.id.group, ticket.id.index) == expected


def test_nobody_renews_or_gives_back_what_another_holds(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path)
    learner(buffer)
    ticket = buffer.issue(0, "a", (0, 0), 1)[0][0]
    held = [(ticket.id, ticket.attempt)]
    assert buffer.renew(0, "b", held) == held
    with pytest.raises(Refused, match="leased to a"):
        buffer.release("b", held)
    assert buffer.renew(0, "a", held) == []
