"""`env.group_score`: all tickets of a group go to one actor; a group is stored as it was scored, or drawn again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer.core import Buffer
from asyncrl.trajectory import Ticket
from asyncrl.trajectory.turns import NOT_SCORED
from tests.buffer.fakes import equation, learner, open_buffer, put, reopen, trajectory
from tests.buffer.tickets.test_turns import counts, episode, played, record, sample, violations


def opened(folder: Path, **changes: Any) -> Buffer:
    buffer = open_buffer(folder, group_scored=True, group_size=4, **changes)
    learner(buffer)
    return buffer


def issue(buffer: Buffer, actor: str, credits: int, now: float = 0.0) -> list[Ticket]:
    return buffer.issue(now, actor, (0, 0), credits)[0]


def places(tickets: Sequence[Ticket]) -> list[tuple[int, int]]:
    return [(t.id.group, t.id.index) for t in tickets]


def test_the_rest_of_a_group_waits_for_the_actor_that_began_it(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    assert places(issue(buffer, "a", 2)) == [(0, 0), (0, 1)]
    assert places(issue(buffer, "b", 3)) == [(1, 0), (1, 1), (1, 2)]
    assert places(issue(buffer, "a", 4)) == [(0, 2), (0, 3), (2, 0), (2, 1)]
    assert places(issue(buffer, "b", 1)) == [(1, 3)]


def test_a_failed_attempt_comes_back_to_the_same_actor(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    tickets = issue(buffer, "a", 4)
    buffer.fail("a", tickets[1].id, 0, "env_error", "boom")
    assert places(issue(buffer, "b", 1)) == [(1, 0)]
    assert places(issue(buffer, "a", 1)) == [(0, 1)]


def test_a_lost_actors_group_goes_to_another_as_a_whole(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    issue(buffer, "a", 4)
    buffer.joined("a")  # it died, and is there again
    assert places(issue(buffer, "b", 4)) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert places(issue(buffer, "a", 1)) == [(1, 0)]


def test_one_lost_between_two_puts_has_its_group_drawn_again(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    tickets = issue(buffer, "a", 4)
    for ticket in tickets[:2]:
        assert put(buffer, trajectory(ticket)) == "stored"
    buffer = reopen(buffer, tmp_path, group_scored=True, group_size=4)
    assert equation(buffer)["in_flight"] == 1, "its leases have a full term"
    buffer.tick(31.0)
    assert equation(buffer) == {"issued": 1, "dropped: env_error": 1}
    again = issue(buffer, "b", 4, now=31.0)
    assert [t.task["id"] for t in again] == [tickets[0].task["id"]] * 4, "the prompt is drawn again"
    assert put(buffer, trajectory(tickets[2])) == "late"
    for ticket in again:
        assert put(buffer, trajectory(ticket)) == "stored"
    assert equation(buffer) == {"issued": 2, "dropped: env_error": 1, "waiting": 1}


@pytest.mark.parametrize("lost", ["killed", "left", "not scored"])
def test_a_group_moves_to_one_actor_with_the_turns_of_its_episodes(tmp_path: Path, lost: str) -> None:
    buffer = opened(tmp_path, durable=True)
    first = issue(buffer, "a", 4)
    said = [[*episode(2), sample(2)], [*episode(2), sample(2)], episode(1), []]  # the first two were over
    for ticket, records in zip(first, said, strict=True):
        record(buffer, ticket, records, "a")
    buffer.commit(0.0)
    if lost == "killed":
        buffer.joined("a")
    elif lost == "left":
        buffer.release("a", [(ticket.id, ticket.attempt) for ticket in first])
    else:
        for ticket in first:
            buffer.fail("a", ticket.id, 0, NOT_SCORED, "the judge is away")
    begun = issue(buffer, "b", 2)
    assert places(begun) == [(0, 0), (0, 1)]
    assert places(issue(buffer, "c", 1)) == [(1, 0)], "the rest of the group is for the same actor"
    begun += issue(buffer, "b", 2)
    assert [len(ticket.turns) for ticket in begun] == [6, 6, 3, 0]
    for ticket in begun:
        assert put(buffer, played(ticket, [sample(n) for n in range(3)], "b")) == "stored"
    assert counts(buffer) == {"continued": 15}
    assert violations(buffer, tmp_path) == []


def test_one_lost_between_two_puts_takes_the_turns_of_its_group_along(tmp_path: Path) -> None:
    buffer = opened(tmp_path, durable=True)
    tickets = issue(buffer, "a", 4)
    for ticket in tickets:
        record(buffer, ticket, episode(1), "a")
    assert put(buffer, played(tickets[0], [sample(0)], "a")) == "stored"
    buffer.joined("a")
    assert equation(buffer) == {"issued": 1, "dropped: env_error": 1}
    assert counts(buffer) == {"continued": 3, "dropped": 9}
    assert violations(buffer, tmp_path) == []
