"""An environment that is down is reported, and ends the run if so configured; it never becomes a reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer.core import Buffer
from asyncrl.buffer.tickets.failures import AllFail
from asyncrl.user_errors import Cause
from tests.buffer.fakes import FakeSource, equation, learner, open_buffer, play, put, step, trajectory


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
    assert buffer.tickets.failures.budget.exceeded
    assert not buffer.tickets.failures.verdict
    play(buffer, now=9000.0)
    step(buffer, incarnation, 0)
    assert not buffer.tickets.failures.budget.exceeded


@pytest.mark.parametrize("reason", ["duplicate", "late"])
def test_a_repeat_is_no_second_attempt(tmp_path: Path, reason: str) -> None:
    buffer = opened(tmp_path)
    learner(buffer)
    (ticket,), _ = buffer.issue(0.0, "actor-0", (0, 0), 1)
    put(buffer, trajectory(ticket))
    assert put(buffer, trajectory(ticket, reward=1.0 if reason == "duplicate" else 0.5)) == reason
    buffer.fail("actor-0", ticket.id, ticket.attempt, "env_error", "too late")
    assert buffer.tickets.failures.budget.share == 0.0


HERE, ELSEWHERE = Cause("KeyError at score.py:3"), Cause("KeyError at score.py:9")
AWAY = Cause("ConnectionError at tool.py:3", outage=True)


def judged(causes: list[Cause | None], *, at: float = 0.0) -> str:
    every = AllFail()
    for cause in causes:
        every.failed(cause, "KeyError: 'answer' (score.py, line 3, in score)")
    every.look(0.0)
    every.look(at)
    return every.verdict


@pytest.mark.parametrize(
    ("causes", "at", "ends"),
    [
        ([HERE] * 20, 0.0, True),
        ([HERE] * 19, 1000.0, False),
        ([*[HERE] * 19, ELSEWHERE], 1000.0, False),
        ([HERE, ELSEWHERE, *[HERE] * 30], 1000.0, False),
        ([HERE, ELSEWHERE] * 49, 1000.0, False),
        ([HERE, ELSEWHERE] * 50, 0.0, True),
        ([HERE, AWAY] * 50, 59.0, False),
        ([HERE, AWAY] * 50, 60.0, True),
        ([*[None] * 10, *[HERE] * 20], 0.0, True),
        ([None] * 40, 1000.0, False),
        ([AWAY] * 40, 59.0, False),
        ([AWAY] * 40, 60.0, True),
        ([AWAY] * 19, 1000.0, False),
        ([*[AWAY] * 10, *[Cause("ReadTimeout at other.py:1", outage=True)] * 10], 60.0, True),
    ],
)
def test_the_first_attempts_end_the_run_only_if_all_fail(causes: list[Cause | None], at: float, ends: bool) -> None:
    assert bool(judged(causes, at=at)) == ends


def test_failures_in_several_ways_are_told_so() -> None:
    assert judged([HERE, ELSEWHERE] * 50).startswith(
        "the first 100 episodes all failed in several ways; the last one: KeyError: 'answer' (score.py, line 3"
    )


def test_one_success_among_failures_in_several_ways_ends_the_judgement() -> None:
    every = AllFail()
    for _ in range(60):
        every.failed(HERE, "")
        every.failed(ELSEWHERE, "")
        every.succeeded()
    every.look(1e6)
    assert not every.verdict


def test_one_success_ends_the_judgement() -> None:
    every = AllFail()
    for _ in range(19):
        every.failed(HERE, "")
    every.succeeded()
    for _ in range(100):
        every.failed(HERE, "")
    every.look(1e6)
    assert not every.verdict


def always_failing(folder: Path, **changes: Any) -> Buffer:
    buffer = open_buffer(folder, env_retries=0, **changes)
    learner(buffer)
    for n in range(20):
        tickets, _ = buffer.issue(100.0 * n, "actor-0", (0, 0), 1)
        buffer.fail("actor-0", tickets[0].id, tickets[0].attempt, "env_error", "KeyError: 'a' (s.py, line 3)", HERE)
    buffer.tick(9000.0)
    return buffer


def test_a_run_whose_first_attempts_all_fail_ends_with_their_words(tmp_path: Path) -> None:
    buffer = always_failing(tmp_path / "ends", stop_if_all_fail=True)
    tickets, why = buffer.issue(9000.0, "actor-0", (0, 0), 4)
    assert tickets == []
    assert "KeyError: 'a' (s.py, line 3)" in why
    assert "--resume" in why
    answer = buffer.batch(9000.0, 1, 0)
    assert (answer.state, answer.failed, answer.why) == ("ended", True, why)
    assert always_failing(tmp_path / "warns").issue(9000.0, "actor-0", (0, 0), 1)[0], "under warn it goes on"


def test_attempts_at_an_evaluation_count_and_end_it(tmp_path: Path) -> None:
    source = FakeSource(held_out_size=30)
    buffer = open_buffer(tmp_path, stop_if_all_fail=True, env_retries=0, eval_tasks=30, source=source)
    learner(buffer)
    buffer.evaluate((0, 0))
    for n in range(20):
        assert not buffer.evaluation(everyone=True).failed
        (ticket,), _ = buffer.issue(float(n), "actor-0", (0, 0), 1)
        assert ticket.kind == "eval"
        buffer.fail("actor-0", ticket.id, ticket.attempt, "env_error", "KeyError: 'a' (s.py, line 3)", HERE)
        buffer.tick(float(n))
    reply = buffer.evaluation(everyone=True)
    assert (reply.done, reply.failed) == (False, True)
    assert "KeyError: 'a' (s.py, line 3)" in reply.why
    assert buffer.issue(99.0, "actor-0", (0, 0), 1) == ([], reply.why)
