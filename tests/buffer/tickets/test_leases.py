"""The leases, and what is counted of them."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from asyncrl.buffer.tickets.leases import Leases
from asyncrl.config.held_out import HeldOutSet
from asyncrl.trajectory import TicketId
from tests.buffer.fakes import learner, open_buffer, play, put, step, trajectory


def test_evaluation_leases_are_counted_by_actor() -> None:
    rng, leases = random.Random(0), Leases(30.0)
    for number in range(400):
        group, index = rng.randrange(6), rng.randrange(3)
        if rng.random() < 0.5:
            leases.add(0.0, TicketId(0, group, index), number, rng.choice("abc"), 0, eval=group >= 3)
        else:
            leases.remove(group, index)
        assert leases.evals == Counter(lease.actor for lease in leases if lease.eval)
        assert 0 not in leases.evals.values()


def test_a_request_for_tickets_looks_through_no_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a set is open, each request went through all of them three times."""
    buffer = open_buffer(tmp_path, eval_sets=(HeldOutSet("few", 3, 1, False, 1.0),), eval_every=1)
    incarnation = learner(buffer)
    play(buffer)
    step(buffer, incarnation, 0)
    monkeypatch.setattr(Leases, "__iter__", lambda self: pytest.fail("all leases were looked through"))
    tickets = buffer.issue(0, "actor-0", (0, 1), 2)[0]
    buffer.hold(0, "actor-0", (0, 1)), buffer.prospect(0, "actor-0", (0, 1))
    assert len(buffer.issue(0, "actor-0", (0, 1), 9)[0]) == 1
    assert buffer.issue(0, "actor-0", (0, 1), 9)[1] == "the last episodes of the evaluation are being played"
    for ticket in tickets:
        assert put(buffer, trajectory(ticket, (1,))) == "stored"
