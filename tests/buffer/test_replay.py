"""Replay in the buffer: used groups beside the new ones of a batch, recorded, redone as they were; they yield."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer.core import Buffer
from asyncrl.buffer.in_process import InProcessBuffer
from asyncrl.buffer.ledger.records import NOTHING
from asyncrl.buffer.replaying import PRIORITIES, Replaying
from asyncrl.buffer.rules import Rules
from tests.buffer.fakes import FakeSource, equation, learner, open_buffer, play, put, reopen, rules, step, trajectory

REPLAY: dict[str, Any] = {"replay": Replaying(1, PRIORITIES["uniform"]), "max_uses": 3, "max_staleness": 3}


def rows(buffer: Buffer, sql: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in buffer.database.read(sql)]


def test_a_batch_is_its_new_groups_in_issue_order_and_used_ones_on_top(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, **REPLAY)
    incarnation = learner(buffer)
    play(buffer)
    assert step(buffer, incarnation, 0) == (0, 1)
    assert buffer.ledger.history.line[0].replay == NOTHING, "nothing was used yet, and nothing is waited for"
    batches = [step(buffer, incarnation, 1), step(buffer, incarnation, 2)]
    for b, (batch, new) in enumerate(zip(batches, [(2, 3), (4, 5)], strict=True), 1):
        (drawn,) = buffer.ledger.history.line[b].replay.drawn
        assert batch == tuple(sorted((*new, drawn.group)))
        assert drawn.group < new[0]
    assert rows(buffer, "SELECT serial, grp, chance, weight FROM replays")[0][2:] == (0.5, 1.0)
    assert rows(buffer, "SELECT first_uses, candidates FROM batches") == [(2, 0), (2, 2), (2, 4)]


def test_the_learner_waits_for_new_groups_and_never_for_used_ones(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, **REPLAY | {"groups_per_step": 2})
    incarnation = learner(buffer)
    play(buffer, credits=6)
    step(buffer, incarnation, 0)
    answer = buffer.batch(0, incarnation, 1)
    assert answer.state == "waiting"
    assert "1 of 2 groups are complete" in answer.why, "three wait, and two of them were used"


def test_the_bound_holds_at_every_use(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, **REPLAY | {"max_staleness": 1, "max_uses": 9})
    incarnation = learner(buffer)
    for b in range(6):
        play(buffer)
        step(buffer, incarnation, b)
    for batch in buffer.ledger.history.line:
        for number in batch.groups:
            group = buffer.ledger.load(number)
            assert group is not None
            assert batch.version - (group.oldest or 0) <= 1
    assert sum(len(batch.replay.drawn) for batch in buffer.ledger.history.line) > 0
    assert {why for (why,) in rows(buffer, "SELECT why FROM retired")} == {"stale"}


def issued(folder: Path, **changes: Any) -> list[tuple[int, str]]:
    """Every group and the step before which it was issued, of a run that asks for all that it can get."""
    buffer, found = open_buffer(folder, **{"max_staleness": 3, "capacity": 12} | changes), []
    incarnation = learner(buffer)
    for b in range(8):
        tickets = play(buffer)
        found += [(ticket.id.group, f"before step {b}") for ticket in tickets]
        step(buffer, incarnation, b)
    buffer.database.close()
    return found


def test_new_groups_are_issued_as_without_replay(tmp_path: Path) -> None:
    """Used ones yield where the capacity of 12 trajectories, 6 groups, would refuse a new one."""
    plain = issued(tmp_path / "plain")
    assert plain == issued(tmp_path / "replay", **REPLAY | {"capacity": 12})
    assert plain != issued(tmp_path / "used", max_uses=3), "without replay they hold their places"


def test_the_oldest_used_groups_yield_and_it_is_recorded_after_which_batch(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, **REPLAY | {"capacity": 8, "max_uses": 9})
    incarnation = learner(buffer)
    play(buffer, credits=4)
    step(buffer, incarnation, 0)
    play(buffer, credits=4)
    assert rows(buffer, "SELECT * FROM retired") == [], "four groups fit"
    play(buffer, credits=2)
    assert rows(buffer, "SELECT grp, branch, batch, why FROM retired") == [(0, 0, 1, "yielded")]
    assert rows(buffer, "SELECT state, ended_batch, uses FROM groups WHERE number = 0") == [("trained", 1, 1)]
    assert equation(buffer) == {"issued": 5, "trained": 1, "waiting": 4}
    assert buffer.tickets.places.taken() == 8
    step(buffer, incarnation, 1)
    assert buffer.tickets.places.taken() <= 8, "what comes back from a batch finds a place, or the oldest yield"
    assert buffer.tickets.places.yielded == len(rows(buffer, "SELECT * FROM retired WHERE why = 'yielded'"))


def test_used_groups_yield_before_the_disk_is_full(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, **REPLAY | {"max_uses": 9})
    incarnation = learner(buffer)
    play(buffer)
    for b in range(3):
        step(buffer, incarnation, b)
    buffer.commit(0)
    bytes_used = buffer.database.payloads.disk_bytes
    buffer = reopen(buffer, tmp_path, **REPLAY | {"max_uses": 9, "max_disk_bytes": bytes_used / 0.85})
    assert buffer.checkpoint_wanted
    buffer.issue(0, "actor-0", (0, 3), 1)
    ended = [n for (n,) in rows(buffer, "SELECT grp FROM retired WHERE why = 'yielded' ORDER BY serial")]
    assert ended == [0], "one of eight groups brings the live ones below 80%"
    buffer = reopen(buffer, tmp_path, **REPLAY | {"max_uses": 9, "max_disk_bytes": bytes_used})
    buffer.issue(0, "actor-0", (0, 3), 9)
    used = [g for g in buffer.ledger.live.values() if g.uses]
    assert used == [], "at a full disk all of them"


def test_a_redone_batch_has_the_same_groups_and_weights(tmp_path: Path) -> None:
    replay = Replaying(2, PRIORITIES["spread"], 1.0, 0.4, 2.0)
    options = REPLAY | {"replay": replay}
    buffer = open_buffer(tmp_path, **options)
    incarnation = learner(buffer)
    for b in range(3):
        for ticket in buffer.issue(0, "actor-0", (0, b), 9)[0]:
            put(buffer, trajectory(ticket, (b,), float(ticket.id.index * (1 + ticket.id.group))))
        step(buffer, incarnation, b)
    before = [(batch.groups, batch.replay) for batch in buffer.ledger.history.line]
    assert len(before[2][1].drawn) == 2
    assert min(one.weight for one in before[2][1].drawn) < 1
    buffer = reopen(buffer, tmp_path, **options)
    again = learner(buffer, batch=1, version=1, branch=0)
    redone = buffer.batch(0, again, 1).batch
    assert redone is not None
    assert (redone.groups, redone.replay) == before[1]
    # It ends otherwise: a branch begins, with this batch as it was.
    buffer.finished(again, 1, "guard")
    assert buffer.ledger.history.branch == 1
    assert (buffer.ledger.history.line[1].groups, buffer.ledger.history.line[1].replay) == before[1]


def test_without_replay_nothing_is_recorded(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, max_uses=2, max_staleness=3)
    incarnation = learner(buffer)
    for b in range(3):
        play(buffer)
        step(buffer, incarnation, b)
    assert rows(buffer, "SELECT * FROM replays") == []
    assert rows(buffer, "SELECT DISTINCT candidates FROM batches") == [(0,)]


@pytest.mark.parametrize("in_process", [True, False])
def test_the_learner_is_told_the_weights(tmp_path: Path, in_process: bool) -> None:
    """The in-process buffer answers as the buffer process does, and draws the same."""
    settings: Rules = rules(**REPLAY | {"replay": Replaying(2, PRIORITIES["uniform"], beta=0.4, half_life=1.0)})
    told = []
    with InProcessBuffer(settings, FakeSource(), folder=None if in_process else tmp_path) as buffer:
        incarnation = buffer.start(0, 0, None).incarnation
        buffer.published(incarnation, 0, 0, "digest-0")
        for b in range(3):
            for ticket in buffer.tickets("actor-0", (0, b), 4, [], 0.0).tickets:
                buffer.put(trajectory(ticket, (b,), float(ticket.id.index)))
            reply = buffer.batch(incarnation, b, 0, 1, 0.0)
            assert {number for number, _ in reply.replayed} <= set(reply.groups)
            assert len(reply.groups) == 2 + len(reply.replayed)
            told.append(reply.replayed)
            buffer.published(incarnation, 0, buffer.finished(incarnation, b, "applied"), f"digest-{b + 1}")
    assert [len(each) for each in told] == [0, 2, 2]
    assert told[1] == ((0, 1.0), (1, 1.0)), "all of one age"
    assert sorted(weight for _, weight in told[2])[-1] == 1.0
