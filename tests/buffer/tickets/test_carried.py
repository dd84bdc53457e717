"""What recorded turns that a ticket carries may hold, how much of them one reply has, and when they end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from asyncrl.buffer.client.messages import Refusal
from asyncrl.buffer.requests.turns import record_turn
from asyncrl.trajectory.kept_ids import KeptIds
from asyncrl.wire.turns import encode_turn
from tests.buffer.fakes import learner, open_buffer
from tests.buffer.tickets.test_turns import (
    RESET,
    answer,
    counts,
    episode,
    issue,
    opened,
    record,
    sample,
    violations,
)


@pytest.mark.parametrize("reason", ["aborted", "timeout"])
def test_an_episode_that_its_actor_gave_up_goes_on(tmp_path: Path, reason: str) -> None:
    buffer = opened(tmp_path, env_retries=1)
    (ticket,) = issue(buffer)
    record(buffer, ticket, episode(1))
    buffer.fail("actor-0", ticket.id, ticket.attempt, reason, "why")
    (ticket,) = issue(buffer)
    assert len(ticket.turns) == 3
    assert violations(buffer, tmp_path) == []
    buffer.database.write("UPDATE turns SET ended = 'failed'")
    assert "ended as failed" in violations(buffer, tmp_path, adds_up=False)[0], "giving up ends no turn"
    buffer.database.write("UPDATE turns SET ended = NULL")
    buffer.fail("actor-0", ticket.id, ticket.attempt, reason, "why")
    assert counts(buffer) == {"dropped": 3}, "not for ever: env.retries counts it"
    assert violations(buffer, tmp_path) == []


def test_what_a_free_ticket_carries_counts_for_the_deadline_of_its_group(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, durable=True, max_staleness=1, over_age="wait")
    learner(buffer)
    (ticket,) = issue(buffer)
    record(buffer, ticket, episode(1))
    group = buffer.ledger.live[ticket.id.group]
    assert buffer.tickets.queue.last_version(group) == 1
    buffer.release("actor-0", [(ticket.id, ticket.attempt)])
    assert buffer.tickets.queue.last_version(group) == 1
    ages = partial(buffer.tickets.carried.versions, group, buffer.leases)
    assert (ages(0), ages(1)) == ([0], []), "what is too old by then ends when the ticket is issued"


def test_one_reply_has_a_bound_of_recorded_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = opened(tmp_path)
    tickets = issue(buffer, credits=3)
    for ticket in tickets:
        record(buffer, ticket, episode(2))
    buffer.release("actor-0", [(ticket.id, ticket.attempt) for ticket in tickets])
    monkeypatch.setattr("asyncrl.buffer.tickets.carried.CARRIED_AT_ONCE", 400)
    (first,) = issue(buffer, credits=3)
    assert len(first.turns) == 5
    assert [len(issue(buffer, credits=1)) for _ in range(2)] == [1, 1]


def test_a_sample_is_bounded_by_its_tokens_and_an_answer_by_its_bytes(tmp_path: Path) -> None:
    buffer = opened(tmp_path, turn_bytes=4096, row_tokens=1000)
    (ticket,) = issue(buffer)
    large = replace(answer(0), messages=[{"role": "tool", "content": "x" * 5000}])
    for each, said in ((RESET, "stored"), (sample(0, tokens=900), "stored"), (large, "buffer.turn_max_kb")):
        frame = encode_turn(ticket.id, ticket.attempt, each)
        outcome = record_turn(buffer, "actor-0", frame, Counter())
        assert said in (outcome if isinstance(outcome, str) else outcome.message)
    assert len(encode_turn(ticket.id, 0, sample(0, tokens=900))) > 4096 + 6000


@pytest.mark.parametrize(
    ("tokens", "kept", "refused"),
    [(8, 2, ""), (9, 2, "has 9 tokens, of 2 kept ids at most, expected at most 8 "), (8, 3, "of 3 kept ids at most, ")],
)
def test_a_sample_that_no_turn_of_the_run_has_is_refused(tmp_path: Path, tokens: int, kept: int, refused: str) -> None:
    buffer = opened(tmp_path, row_tokens=8, max_kept=2)
    (ticket,) = issue(buffer)
    each = [[token, 100, 101][:kept] for token in range(tokens)]
    ids = KeptIds(np.full(tokens, kept, np.uint16), np.array(each, np.int32).ravel())
    frame = encode_turn(ticket.id, ticket.attempt, sample(0, tokens=tokens, kept=ids))
    outcome = record_turn(buffer, "actor-0", frame, Counter())
    if refused:
        assert isinstance(outcome, Refusal)
        assert refused in outcome.message
    else:
        assert outcome == "stored"
