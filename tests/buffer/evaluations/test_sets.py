"""When sets open, close, start again and are skipped; who plays them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer.core import Buffer
from asyncrl.buffer.rules import Refused
from asyncrl.config.held_out import HeldOutSet
from asyncrl.success import wilson
from asyncrl.trajectory import Ticket
from tests.buffer.fakes import FakeSource, equation, learner, open_buffer, play, put, reopen, step, trajectory

TWO = (HeldOutSet("easy", 2, 1, False, 1.0), HeldOutSet("hard", 1, 2, True, 0.5, pass_at=(2,)))
"""2 tickets and 3."""


def test_an_evaluation_is_pinned_and_apart_from_training(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, eval_tasks=3, eval_samples=1, env_retries=0)
    incarnation = learner(buffer)
    training = buffer.issue(0, "a", (0, 0), 1)[0][0]
    buffer.evaluate((0, 0))
    buffer.evaluate((0, 0))
    assert buffer.renew(0, "a", [(training.id, 0)]) == [(training.id, 0)]
    tickets = buffer.issue(0, "a", (0, 0), 99)[0]
    assert [(t.kind, t.eval_set, t.temperature) for t in tickets] == [
        ("eval", "held_out", 1.0),
        ("eval", "held_out", 0.0),
    ] * 3
    assert buffer.issue(0, "b", (0, 0), 9) == ([], "the last episodes of the evaluation are being played")
    with pytest.raises(Refused, match="met versions"):
        put(buffer, trajectory(tickets[0], (0, 1)))
    tickets[0] = buffer.issue(0, "b", (0, 0), 9)[0][0]
    for ticket in tickets[:-1]:
        assert put(buffer, trajectory(ticket, (0,), 0.5)) == "stored"
    assert put(buffer, trajectory(tickets[0], (0,), 0.5)) == "duplicate"
    buffer = reopen(buffer, tmp_path, eval_tasks=3, eval_samples=1, env_retries=0)
    reply = buffer.evaluation(everyone=True)
    assert (reply.finished, reply.total, reply.pinned) == (5, 6, (0, 0))
    last = buffer.issue(0, "b", (0, 0), 9)[0]
    assert len(last) == 1
    buffer.fail("b", last[0].id, last[0].attempt, "env_error", "boom")
    reply = buffer.evaluation(everyone=True)
    (played,) = reply.sets
    assert (reply.done, reply.pinned, played.state, played.failed) == (True, None, "done", 1)
    assert played.failure == "env_error: boom"
    assert {way: (m.share, m.episodes, m.failed, m.reward) for way, m in played.measures.items()} == {
        "sampled": (0.0, 3, 0, 0.5),
        "greedy": (0.0, 2, 1, 0.5),
    }
    assert (played.measures["sampled"].low, played.measures["sampled"].high) == wilson(0.0, 3)
    assert buffer.issue(0, "a", (0, 0), 1)[0][0].kind == "train"
    assert equation(buffer)["issued"] == 1
    assert buffer.batch(0, incarnation, 0).state == "waiting"


def test_no_message_pins_an_evaluation_to_a_version_that_nobody_has(tmp_path: Path) -> None:
    """Neither `evaluate` nor the weights that an actor says it holds; and a set of an older release ends at opening."""
    buffer = open_buffer(tmp_path, eval_tasks=1, eval_greedy=False)
    learner(buffer)
    for forged in ((0, 10**6), (0, 1), (1, 0), (0, -1), (2**31 - 1, 0)):
        with pytest.raises(Refused, match="is the last that was published"):
            buffer.evaluate(forged)
    assert buffer.issue(0, "a", (0, 0), 1)[0][0].kind == "train"
    buffer.evaluate((0, 0))
    for forged in ((0, 10**6), (1, 0), (2**31 - 1, 0)):
        tickets, why = buffer.issue(0, "evil", forged, 9)
        assert (tickets, "the learner has made none" in why) == ([], True)
    assert [t.kind for t in buffer.issue(0, "a", (0, 0), 9)[0]] == ["eval"]
    buffer.database.write("UPDATE evals SET version = 1000000")
    buffer = reopen(buffer, tmp_path, eval_tasks=1, eval_greedy=False)
    assert buffer.issue(0, "a", (0, 0), 1)[0][0].kind == "train"
    buffer.evaluate((0, 0))
    assert [t.kind for t in buffer.issue(0, "a", (0, 0), 9)[0]] == ["eval"]


def states(buffer: Buffer) -> list[tuple[Any, ...]]:
    rows = buffer.database.read("SELECT name, branch, due, on_branch, version, state FROM evals ORDER BY serial")
    return list(rows)


def a_run(folder: Path, steps: int, **changes: Any) -> tuple[Buffer, int]:
    """One actor, `actor-1`, has played that many steps of it."""
    buffer = open_buffer(folder, **({"eval_sets": TWO, "eval_every": 2, "eval_reserved": 1} | changes))
    incarnation = learner(buffer)
    for b in range(steps):
        train(buffer, incarnation, b)
    return buffer, incarnation


def train(buffer: Buffer, incarnation: int, b: int) -> None:
    held = buffer.ledger.history.published or 0
    for ticket in buffer.issue(0, "actor-1", (buffer.ledger.history.branch, held), 99)[0]:
        assert ticket.kind == "train"
        put(buffer, trajectory(ticket, (held,)))
    step(buffer, incarnation, b)


def evaluate(buffer: Buffer, pinned: tuple[int, int], actor: str = "actor-0", now: float = 0.0) -> list[Ticket]:
    tickets = buffer.issue(now, actor, pinned, 99)[0]
    for ticket in tickets:
        assert put(buffer, trajectory(ticket, (pinned[1],))) == "stored"
    return tickets


def test_what_ended_between_two_looks_of_the_learner_is_told_behind_the_next_evaluation(tmp_path: Path) -> None:
    """The learner looks before each batch; sets that end after it, and before the next publication, were never told."""
    buffer, incarnation = a_run(tmp_path, 2)
    evaluate(buffer, (0, 2))
    for b in (2, 3):
        train(buffer, incarnation, b)
    told = [(s.name, s.due, s.state) for s in buffer.evaluation().sets]
    assert told == [("easy", 2, "done"), ("hard", 2, "done"), ("easy", 4, "open"), ("hard", 4, "open")]


def test_sets_open_when_they_are_due_and_training_goes_on(tmp_path: Path) -> None:
    buffer, incarnation = a_run(tmp_path, 2)
    assert states(buffer) == [("easy", 0, 2, 0, 2, "open"), ("hard", 0, 2, 0, 2, "open")]
    train(buffer, incarnation, 2)
    assert buffer.hold(0, "actor-0", (0, 3)) == (0, 2), "back from a later version"
    assert buffer.hold(0, "actor-1", (0, 3)) is None
    assert buffer.issue(0, "actor-0", (0, 3), 9) == (
        [],
        "actor-0 holds weights (0, 3), the evaluation is pinned to (0, 2)",
    )
    assert len(evaluate(buffer, (0, 2))) == 5
    assert [row[-1] for row in states(buffer)] == ["done", "done"]
    reply = buffer.evaluation()
    assert [(s.name, s.due, s.version, s.skipped) for s in reply.sets] == [
        ("easy", 2, (0, 2), 0),
        ("hard", 2, (0, 2), 0),
    ]
    assert dict(reply.sets[1].measures["sampled"].pass_at) == {2: 1.0}
    assert (reply.done, reply.pinned) == (True, None)
    assert buffer.hold(0, "actor-0", (0, 2)) == (0, 2), "a reserved actor keeps what it has"
    tickets, why = buffer.issue(0, "actor-0", (0, 2), 9)
    assert (tickets, "plays nothing else (actors.eval)" in why) == ([], True)


def test_while_a_set_is_open_no_later_step_opens_one_and_a_redone_step_evaluates_no_set_again(tmp_path: Path) -> None:
    buffer, incarnation = a_run(tmp_path, 4)
    assert [row[2::3] for row in states(buffer)] == [(2, "open"), (2, "open"), (4, "skipped"), (4, "skipped")]
    buffer = reopen(buffer, tmp_path, eval_sets=TWO, eval_every=2, eval_reserved=1)
    evaluate(buffer, (0, 2))
    assert [s.skipped for s in buffer.evaluation().sets] == [1, 1]
    incarnation = learner(buffer, 1, 1, branch=0, publish=False)
    for b in (1, 2, 3):
        step(buffer, incarnation, b)
    assert [row[-1] for row in states(buffer)] == ["done", "done", "skipped", "skipped"], "steps 2 and 4 were redone"
    incarnation = learner(buffer, 1, 1, branch=0, publish=False, fresh=True)
    buffer.published(incarnation, 1, 1, "fresh")
    train(buffer, incarnation, 1)
    assert states(buffer)[4:] == [("easy", 1, 2, 1, 2, "open"), ("hard", 1, 2, 1, 2, "open")], "a new branch does"


def test_a_lost_version_starts_the_sets_again_at_the_newest_twice_and_their_identity_stays(tmp_path: Path) -> None:
    buffer, incarnation = a_run(tmp_path, 3)
    stale = buffer.issue(0, "actor-0", (0, 2), 1)[0][0]
    buffer.evaluation(lost=(0, 1))
    assert buffer.evals.pinned == (0, 2), "it is not pinned to that one"
    buffer.evaluation(lost=(0, 2))
    assert buffer.renew(0, "actor-0", [(stale.id, 0)]) == [(stale.id, 0)]
    assert put(buffer, trajectory(stale, (2,))) == "late"
    assert states(buffer)[2:] == [("easy", 0, 2, 0, 3, "open"), ("hard", 0, 2, 0, 3, "open")]
    for b in (3, 4):
        train(buffer, incarnation, b)
        buffer.evaluation(lost=buffer.evals.pinned)
    assert [row[-1] for row in states(buffer) if row[2] == 2] == ["restarted"] * 4 + ["failed"] * 2
    assert [s.state for s in buffer.evaluation().sets] == ["failed", "failed"]
    assert not buffer.evals.is_open


def test_with_none_reserved_a_share_of_the_actors_is_chosen_until_its_part_is_done(tmp_path: Path) -> None:
    buffer, _ = a_run(tmp_path, 1, eval_every=1, eval_reserved=0, eval_share=0.5)
    for actor in "abc":
        buffer.renew(0, actor, [])
    first = buffer.issue(0, "a", (0, 1), 2)[0]
    second = buffer.issue(0, "b", (0, 1), 2)[0]
    assert [t.kind for t in first + second] == ["eval"] * 4
    assert buffer.issue(0, "c", (0, 1), 1)[0][0].kind == "train", "2 of the 4 actors that were heard"
    assert buffer.issue(0, "b", (0, 1), 9)[0][0].kind == "eval"
    assert (buffer.hold(0, "a", (0, 1)), buffer.hold(0, "b", (0, 1))) == ((0, 1), (0, 1))
    for ticket in first:
        put(buffer, trajectory(ticket, (1,)))
    assert buffer.hold(0, "a", (0, 1)) is None, "its part is done"
    assert buffer.issue(0, "a", (0, 1), 1)[0][0].kind == "train"
    assert buffer.status()["players"] == ["b"]
    buffer.tick(100.0)
    assert buffer.issue(100.0, "c", (0, 1), 9)[0][0].kind == "eval", "b was not heard of: c takes its place"


def test_a_single_actor_evaluates_and_trains_in_turn(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, eval_sets=TWO, eval_every=1)
    incarnation = learner(buffer)
    play(buffer)
    step(buffer, incarnation, 0)
    assert len(evaluate(buffer, (0, 1))) == 5
    assert play(buffer)[0].kind == "train"


def test_at_the_end_every_actor_finishes_what_is_open(tmp_path: Path) -> None:
    buffer, _ = a_run(tmp_path, 3, eval_every=1)
    assert buffer.evals.pinned == (0, 1)
    training = buffer.issue(0, "actor-1", (0, 3), 1)[0][0]
    assert not buffer.evaluation().done
    assert buffer.renew(0, "actor-1", [(training.id, training.attempt)]) == []
    with pytest.raises(Refused, match="is open"):
        buffer.evaluate((0, 3))
    assert not buffer.evaluation(everyone=True).done
    assert buffer.renew(0, "actor-1", [(training.id, training.attempt)]) != [], "training leases are revoked"
    evaluate(buffer, (0, 1), "actor-1")
    buffer.evaluate((0, 3))
    assert states(buffer)[4:] == [
        ("easy", 0, 3, 0, 3, "skipped"),
        ("hard", 0, 3, 0, 3, "skipped"),
        ("easy", 0, 3, 0, 3, "open"),
        ("hard", 0, 3, 0, 3, "open"),
    ], "what was skipped at the last step is played after it"
    evaluate(buffer, (0, 3), "actor-1")
    buffer.evaluate((0, 3))
    assert [row[-1] for row in states(buffer)[6:]] == ["done", "done"]


def test_sets_with_a_source_of_their_own_and_sets_that_the_configuration_no_longer_has(tmp_path: Path) -> None:
    class Hard(FakeSource):
        def held_out(self, index: int) -> dict[str, Any]:
            return {"id": f"hard-{index}", "prompt": "?"}

    buffer = open_buffer(tmp_path, eval_sets=TWO, held_out={"hard": Hard()})
    learner(buffer)
    buffer.evaluate((0, 0))
    ids = [(t.eval_set, t.task["id"], t.temperature) for t in buffer.issue(0, "a", (0, 0), 9)[0]]
    assert ids == [
        ("easy", "held-out-0", 1.0),
        ("easy", "held-out-1", 1.0),
        ("hard", "hard-0", 0.5),
        ("hard", "hard-0", 0.5),
        ("hard", "hard-0", 0.0),
    ]
    buffer = reopen(buffer, tmp_path, eval_sets=TWO[:1])
    assert [row[-1] for row in states(buffer)] == ["open", "failed"]
