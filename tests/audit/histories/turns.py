"""Recorded turns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from asyncrl.trajectory.turns import RecordedSample
from tests.audit.simulated import Simulated
from tests.buffer.fakes import trajectory
from tests.buffer.tickets.test_turns import RESET, answer, episode, played, sample


def recorded(folder: Path) -> Simulated:
    """Turns were recorded: continued by a later attempt, interrupted in a sample, ended in every other way."""
    run = Simulated(folder, durable=True, env_retries=9)
    first = run.issue(6)
    for ticket in first[:4]:
        run.record(ticket, [*episode(2), sample(2, stop_reason="abort")])
        run.buffer.release("actor-0", [(ticket.id, ticket.attempt)])
    for ticket in first[4:]:
        run.record(ticket, episode(1))
    run.kill()
    again = run.issue(4)
    for ticket, samples in zip(again, ([0, 1, 2], [0, 1, 2], [0, 1], [5]), strict=True):
        if ticket.id.index == 1:
            run.record(ticket, [sample(2, tokens=4 if ticket.id.group else 5)])
        run.put_made(played(ticket, [sample(n, tokens=4 if n == 2 else 3) for n in samples]))
    run.step()
    run.checkpoint()
    run.buffer.fail("actor-0", first[4].id, 0, "env_error", "away")
    run.buffer.fail("actor-0", first[5].id, 0, "env_diverged", "another answer")
    for ticket in run.issue(8):
        if ticket.id.group > 2:
            run.record(ticket, [RESET, sample(0, 1), answer(0)])
            run.buffer.release("actor-0", [(ticket.id, ticket.attempt)])
        else:
            run.put(ticket)
    for ticket in run.issue(2):
        run.record(ticket, [RESET, sample(0, 1, tokens=2)])
        run.put_made(played(ticket, [sample(0, 1, tokens=2)]))
    run.step()
    for ticket in run.issue(8):
        if ticket.id.group % 2:
            run.put(ticket)
    run.step()
    for ticket in run.issue(3):
        run.record(ticket, [RESET, sample(0, run.buffer.ledger.history.version)])
    return run


def branched(folder: Path) -> Simulated:
    """A branch began while groups were in flight: they went on with a stored trajectory and turns, of which
    some were too late; one had a trajectory that was too late."""
    run = Simulated(folder, durable=True, max_staleness=3)
    first = run.issue(8)
    for ticket in first[:5]:
        run.put(ticket)
    for ticket in first[5:7]:
        run.record(ticket, episode(1))
    run.hand_over(first[7])
    run.step()
    run.checkpoint()
    run.record(first[6], [sample(1, 1), answer(1)])
    again, *more = run.issue(7)
    for ticket in more[:5]:
        run.put(ticket)
    run.step()
    run.record(first[6], [sample(2, 2), answer(2)])
    late = run.issue(3)
    run.put(late[0])
    run.record(late[1], [RESET, sample(0, 2)])
    run.fork(1, 1)
    run.put(again)
    tickets = run.issue(20)
    for ticket in tickets:
        if ticket.turns and ticket.id.group < 4:
            samples = [r for r in ticket.turns if isinstance(r, RecordedSample)]
            begun = samples.pop() if samples[-1].partial else None
            last = sample(len(samples), 1, tokens=4)
            if begun is not None:  # of the turn in which the actor left
                last = replace(last, versions=np.append(begun.versions, last.versions[-1:]))
            run.record(ticket, [last])
            run.put_made(played(ticket, [*samples, last]))
        elif ticket.id.group < 6:
            run.put(ticket)
    run.step()
    run.checkpoint()
    return run


def measured(folder: Path) -> Simulated:
    """Turns were recorded once episodes took long, and some that took long came to no end."""
    run = Simulated(folder, turns_auto_s=60.0, env_retries=9)
    first = run.issue(1)
    run.put(first[0])

    def rounds(count: int, seconds: float) -> None:
        for _ in range(count):
            for ticket in run.issue(6):
                made = trajectory(ticket, (ticket.min_version[1],), float(ticket.id.index))
                run.put_made(replace(made, timings={"total": seconds + ticket.id.index}))
            run.step()

    rounds(2, 59.5)
    (ticket,) = run.issue(1)
    run.ahead = 100.0
    run.buffer.release("actor-0", [(ticket.id, 0)])
    rounds(2, 10.0)
    run.kill()
    assert [t.durable for t in (*first, *run.issue(3))] == [False, True, True, True]
    return run
