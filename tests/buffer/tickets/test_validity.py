"""A put that the audit would call a violation is refused, and says why."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.audit.checks.references import rows
from asyncrl.audit.reading import read_ledger
from asyncrl.buffer.core import Buffer
from asyncrl.buffer.ledger.group import Received, version_counts
from asyncrl.buffer.ledger.storage.payloads import Location
from asyncrl.buffer.record import to_record
from asyncrl.buffer.rules import Refused
from asyncrl.trajectory import Ticket, TicketId, Trajectory
from tests.buffer.fakes import learner, open_buffer, trajectory
from tests.buffer.tickets.test_turns import record, sample


def issue(buffer: Buffer, actor: str, version: int = 0, credits: int = 1) -> list[Ticket]:
    return buffer.issue(0.0, actor, (0, version), credits)[0]


def train_on(buffer: Buffer, incarnation: int, b: int) -> None:
    """One training step; what is left of incomplete groups is given back."""
    tickets = issue(buffer, "other", b, 100)
    groups: dict[int, list[Ticket]] = {}
    for ticket in tickets:
        groups.setdefault(ticket.id.group, []).append(ticket)
    back: list[Ticket] = []
    for members in groups.values():
        if len(members) == 2:
            for ticket in members:
                put(buffer, trajectory(ticket, (b,)), "other")
        else:
            back += members
    buffer.release("other", [(t.id, t.attempt) for t in back])
    assert buffer.batch(0.0, incarnation, b).state == "ready"
    buffer.finished(incarnation, b, "applied")
    buffer.published(incarnation, 0, b + 1, "digest")


def put(buffer: Buffer, t: Trajectory, actor: str) -> str:
    t = replace(t, actor=actor)
    return buffer.accept(t, to_record(t))


def at_version(folder: Path, version: int, **changes: Any) -> Buffer:
    buffer = open_buffer(folder, max_staleness=3, **changes)
    incarnation = learner(buffer)
    for b in range(version):
        train_on(buffer, incarnation, b)
    return buffer


def attempts(buffer: Buffer, ticket: Ticket) -> list[tuple[Any, ...]]:
    where = (ticket.id.group, ticket.id.index)
    return list(buffer.database.read("SELECT actor, ended FROM attempts WHERE grp = ? AND idx = ?", where))


def test_another_actors_put_is_refused_and_ends_nothing(tmp_path: Path) -> None:
    buffer = at_version(tmp_path, 0)
    (ticket,) = issue(buffer, "a")
    with pytest.raises(Refused, match=r"put of ticket 0.0.0 came from b, and attempt 0 at it was leased to a") as no:
        put(buffer, trajectory(ticket), "b")
    assert no.value.code == "wrong_actor"
    assert attempts(buffer, ticket) == [("a", None)]
    assert put(buffer, trajectory(ticket), "a") == "stored"
    with pytest.raises(Refused, match="leased to a"):
        put(buffer, trajectory(ticket), "b")
    with pytest.raises(Refused, match="leased to a"):
        put(buffer, trajectory(ticket, reward=0.5), "b")
    assert attempts(buffer, ticket) == [("a", "stored")]
    assert not buffer.ledger.account.counters, "neither late nor duplicate"


def test_tokens_older_than_the_attempt_end_it_and_its_ticket_is_issued_again(tmp_path: Path) -> None:
    buffer = at_version(tmp_path, 2)
    (ticket,) = issue(buffer, "a", 2)
    assert ticket.min_version == (0, 2)
    with pytest.raises(Refused, match=r"a token of version 1; attempt \d at it was leased to a for .* version 2") as no:
        put(buffer, trajectory(ticket, (1, 2)), "a")
    assert no.value.code == "old_tokens"
    assert attempts(buffer, ticket)[-1] == ("a", "failed")
    assert buffer.ledger.live[ticket.id.group].stored[ticket.id.index] is None
    (again,) = issue(buffer, "b", 2)
    assert (again.id, again.attempt) == (ticket.id, ticket.attempt + 1)
    with pytest.raises(Refused, match="version 1"):
        put(buffer, trajectory(ticket, (1, 2)), "a")
    assert attempts(buffer, ticket)[-1] == ("b", None), "a refused put of an attempt that is over ends no other"
    assert put(buffer, trajectory(ticket, (2,)), "a") == "stored", "a valid put of the older attempt still wins"
    assert attempts(buffer, ticket)[-2:] == [("a", "stored"), ("b", "revoked")]


def test_it_is_retried_within_the_budget_and_not_for_ever(tmp_path: Path) -> None:
    buffer = at_version(tmp_path, 1, env_retries=1)
    for _ in range(2):
        (ticket,) = issue(buffer, "a", 1)
        with pytest.raises(Refused):
            put(buffer, trajectory(ticket, (0,)), "a")
    assert buffer.ledger.account.equation(0)["dropped: env_error"] == 1


@pytest.mark.parametrize("change", [{"task_id": "other"}, {"stop_reason": "aborted"}, {"versions": (9,)}])
def test_whatever_is_refused_ends_the_attempt_of_its_actor(tmp_path: Path, change: dict[str, Any]) -> None:
    buffer = at_version(tmp_path, 0)
    (ticket,) = issue(buffer, "a")
    of: dict[str, Any] = {"ticket": ticket.id, "task_id": str(ticket.task["id"])} | change
    with pytest.raises(Refused):
        put(buffer, trajectory(**of), "a")
    assert attempts(buffer, ticket) == [("a", "failed")]


def test_what_continues_a_recorded_turn_may_be_as_old_as_the_turn(tmp_path: Path) -> None:
    buffer = at_version(tmp_path, 0, durable=True)
    ticket, _ = issue(buffer, "a", credits=2)
    train_on(buffer, 1, 0)
    record(buffer, ticket, [sample(0, stop_reason="abort")], "a")
    buffer.release("a", [(ticket.id, ticket.attempt)])
    (again,) = issue(buffer, "b", 1)
    assert again.id == ticket.id
    assert again.min_version == (0, 1)
    assert put(buffer, trajectory(again, (0, 0, 1)), "b") == "stored"


def test_another_actors_ticket_is_not_released(tmp_path: Path) -> None:
    buffer = at_version(tmp_path, 0)
    mine, theirs = issue(buffer, "a"), issue(buffer, "b")
    leases = [(ticket.id, ticket.attempt) for ticket in (*mine, *theirs)]
    with pytest.raises(Refused, match=r"release of ticket 0.0.1 came from a, and attempt 0 at it was leased to b"):
        buffer.release("a", leases)
    assert len(buffer.leases) == 2, "none of them"
    buffer.release("a", leases[:1])
    buffer.release("a", leases[:1])  # the message came twice
    buffer.release("a", [(TicketId(0, 7, 0), 0)])  # of a history that is lost
    assert len(buffer.leases) == 1


def test_another_actors_failure_is_refused(tmp_path: Path) -> None:
    buffer = at_version(tmp_path, 0, env_retries=0)
    (ticket,) = issue(buffer, "a")
    with pytest.raises(Refused, match=r"fail of ticket 0.0.0 came from b, and attempt 0 at it was leased to a"):
        buffer.fail("b", ticket.id, ticket.attempt, "env_error", "boom")
    assert attempts(buffer, ticket) == [("a", None)]
    assert buffer.status()["refused"] == {"wrong_actor": 1}


def test_of_an_evaluation_too(tmp_path: Path) -> None:
    buffer = at_version(tmp_path, 0, eval_tasks=1, eval_greedy=False, env_retries=0)
    buffer.evaluate((0, 0))
    (ticket,) = issue(buffer, "a")
    assert ticket.kind == "eval"
    for versions in ((0,), (0, 1)):
        with pytest.raises(Refused, match="leased to a"):
            put(buffer, trajectory(ticket, versions), "b")
    with pytest.raises(Refused, match="leased to a"):
        buffer.fail("b", ticket.id, ticket.attempt, "env_error", "boom")
    buffer.tick(60.0)
    (again,), _ = buffer.issue(60.0, "b", (0, 0), 1)
    with pytest.raises(Refused, match="met versions"):
        put(buffer, trajectory(ticket, (0, 1)), "a")
    assert [lease.actor for lease in buffer.leases] == ["b"], "of an older attempt: it ends no other"
    assert put(buffer, trajectory(again, (0,)), "b") == "stored"


ACTORS = ("a", "b")
ENDS = ("lapsed", "released", "failed", "handed over", "leased")


Life = tuple[str, str, int]
"""An attempt: its actor, how it ended, and the learner's version when it began."""


@st.composite
def lives(draw: st.DrawFn) -> list[Life]:
    versions = sorted(draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)))
    return [(draw(st.sampled_from(ACTORS)), draw(st.sampled_from(ENDS)), version) for version in versions]


def lived(folder: Path, lives: list[Life]) -> tuple[Buffer, Ticket]:
    """A buffer whose first ticket had these attempts; others, of `other`, may lie between them."""
    buffer = open_buffer(folder, max_staleness=3, env_retries=99, capacity=999, durable=True)
    incarnation = learner(buffer)
    version, now, first, second = 0, 0.0, None, None
    for number, (actor, ended, at) in enumerate(lives, 1):
        for b in range(version, at):
            train_on(buffer, incarnation, b)
        version = max(version, at)
        (ticket,), _ = buffer.issue(now, actor, (0, version), 1)
        first = first or ticket
        assert ticket.id == first.id
        second = second or issue(buffer, "keeper", version)[0]  # so that the group stays incomplete
        lease = (ticket.id, ticket.attempt)
        if ended == "handed over":
            record(buffer, ticket, [sample(0, version, stop_reason="abort")], actor)
        if ended in ("released", "handed over"):
            buffer.release(actor, [lease])
        elif ended == "failed":
            buffer.fail(actor, *lease, "env_error", "boom")
        elif ended == "lapsed" or number < len(lives):
            now += 60.0
            buffer.renew(now, "keeper", [(second.id, second.attempt)])
            buffer.tick(now)
    assert first is not None
    return buffer, first


@settings(deadline=None, max_examples=60)
@given(
    past=lives(),
    which=st.integers(0, 99),
    actor=st.sampled_from((*ACTORS, "other")),
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=3),
)
def test_what_is_refused_and_what_the_audit_calls_a_violation_are_equal(
    past: list[Life], which: int, actor: str, tokens: list[int]
) -> None:
    """For one record, whatever became of the attempts before it."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        buffer, ticket = lived(Path(one), past)
        reached = buffer.ledger.history.recorded_version
        attempt = which % (len(attempts(buffer, ticket)) + 1)  # the last one was never issued
        made = trajectory(ticket, tuple(sorted(min(token, reached) for token in tokens)))
        made = replace(made, attempt=attempt, actor=actor)
        try:
            outcome: str = buffer.accept(made, to_record(made))
        except Refused as refused:
            outcome = refused.code
        buffer.commit(0.0)
        buffer.database.close()
        assert list(rows(read_ledger(Path(one)))) == [], "whatever came, the audit agrees with what was stored"

        forced, _ = lived(Path(two), past)  # the same ledger, and the put is stored without being asked
        group = forced.ledger.live[ticket.id.group]
        versions, nowhere = version_counts(made), Location(0, 0, 0, 0)
        forced.ledger.record_trajectory(group, ticket.id.index, Received.of(made, versions, made.digest(), nowhere))
        forced.commit(0.0)
        forced.database.close()
        violations = list(rows(read_ledger(Path(two))))
        assert (outcome == "stored") == (violations == []), (outcome, violations)
        assert outcome in ("stored", "unknown_ticket", "wrong_actor", "old_tokens")
