"""An environment that is down is reported, and ends the run if so configured; it never becomes a reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer.core import Buffer
from tests.buffer.fakes import equation, learner, open_buffer, play, put, step, trajectory


def fail_all(buffer: Buffer, count: int) -> None:
    """Attempts that fail, one after the other."""
    for n in range(count):
        tickets, why = buffer.issue(100.0 * n, "actor-0", (0, 0), 1)
        if not tickets:
            assert "failed in their environment" in why
            return
        buffer.fail("actor-0", tickets[0].id, tickets[0].attempt, "env_error", "tool f: Connection refused")


def opened(folder: Path, **changes: Any) -> Buffer:
    return open_buffer(folder, max_failures=0.5, failure_window=8, env_retries=0, **changes)


def test_past_the_budget_the_run_stops_and_says_why(tmp_path: Path) -> None:
    buffer = opened(tmp_path, stop_on_failures=True)
    incarnation = learner(buffer)
    play(buffer, 4)
    fail_all(buffer, 20)
    tickets, why = buffer.issue(9000.0, "actor-0", (0, 0), 4)
    assert tickets == []
    assert why.endswith("the last one: env_error: tool f: Connection refused")
    answer = buffer.batch(9000.0, incarnation, 0)
    assert (answer.state, answer.failed, answer.why) == ("ended", True, why)
    assert "5 of the last 8 episodes" in why
    counts = equation(buffer)
    assert (counts["dropped: env_error"], counts["waiting"]) == (5, 2), "what is complete waits for the run to go on"


def test_under_warn_it_goes_on_and_success_ends_it(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    incarnation = learner(buffer)
    fail_all(buffer, 8)
    assert buffer.tickets.failures.exceeded
    assert not buffer.tickets.failing
    play(buffer, now=9000.0)
    step(buffer, incarnation, 0)
    assert not buffer.tickets.failures.exceeded


@pytest.mark.parametrize("reason", ["duplicate", "late"])
def test_a_repeat_is_no_second_attempt(tmp_path: Path, reason: str) -> None:
    buffer = opened(tmp_path)
    learner(buffer)
    (ticket,), _ = buffer.issue(0.0, "actor-0", (0, 0), 1)
    put(buffer, trajectory(ticket))
    assert put(buffer, trajectory(ticket, reward=1.0 if reason == "duplicate" else 0.5)) == reason
    buffer.fail("actor-0", ticket.id, ticket.attempt, "env_error", "too late")
    assert buffer.tickets.failures.share == 0.0
