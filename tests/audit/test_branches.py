"""A branch goes on with nothing of a later version than its first: the audit notices a buffer that keeps some."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.audit.checks import violations
from asyncrl.buffer.batches import batches
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.tickets.turns import Turns
from tests.audit.simulated import Simulated
from tests.buffer.tickets.test_turns import RESET, played, sample


def fork_that_drops_nothing(ledger: Ledger, b: int, version: int, why: str) -> None:
    for batch in ledger.history.fork(b, version, why):
        for number in batch.groups:
            ledger.undo_use(number, batch.outcome)
    ledger.live = dict(sorted(ledger.live.items()))


def found(run: Simulated) -> list[str]:
    return [str(v) for v in violations(run.evidence())]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("broken", [False, True])
def test_no_group_has_a_trajectory_of_a_version_that_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: bool, trained: bool
) -> None:
    if broken:
        monkeypatch.setattr(batches, "fork", fork_that_drops_nothing)
    run = Simulated(tmp_path, max_staleness=3)
    run.rounds(2)
    one, _ = run.issue(2)
    run.put(one)
    run.fork(1, 1)
    for _ in range(3 * trained):
        for ticket in run.issue(8):
            run.put(ticket)
        run.step()
    said = f"trajectory 0.{one.id.group}.0, lent on branch 0, has version 2; branch 1 began at version 1, and"
    texts = found(run)
    assert any(said in text for text in texts) == broken
    assert broken or texts == []


@pytest.mark.parametrize("ended", ["kept", "continued", "longer"])
@pytest.mark.parametrize("broken", [False, True])
def test_no_recorded_turn_of_a_version_that_was_left_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: bool, ended: str
) -> None:
    """`longer`: the interrupted sample is continued on the branch, where the whole one is recorded."""
    if broken:
        monkeypatch.setattr(Turns, "forked", lambda self, version: None)
    run = Simulated(tmp_path, max_staleness=3, durable=True)
    run.rounds(2)
    _, two = run.issue(2)
    stop = "abort" if ended == "longer" else "stop"
    run.record(two, [RESET, sample(0, 2, stop_reason=stop)])
    run.fork(1, 1)
    for ticket in run.issue(8) if ended != "kept" else ():
        begun = (ticket.id.group, ticket.id.index) == (two.id.group, two.id.index) and bool(ticket.turns)
        if begun and ended == "longer":
            run.record(ticket, [sample(0, 2, tokens=4)] if len(ticket.turns) > 1 else [])
        version, tokens = (2, 4 if ended == "longer" else 3) if begun and broken else (1, 3)
        run.put_made(played(ticket, [sample(0, version, tokens=tokens)]))
    said = f"recorded turn 0 of attempt 0 at trajectory 0.{two.id.group}.1 has a token of version 2, and went on"
    assert run.buffer.tickets.carried.turns.counts[ended if broken else "discarded_branch"]
    texts = found(run)
    assert any(said in text for text in texts) == broken
    assert broken or texts == []
