"""Learners that die, resume, fork history or are killed by a batch: what the buffer makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer.rules import Refused
from asyncrl.buffer.selection import zero_variance
from tests.buffer.fakes import equation, learner, open_buffer, play, put, reopen, step, trajectory


def test_a_learner_that_resumes_redoes_the_recorded_batches(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path)
    incarnation = learner(buffer)
    done = []
    for b in range(3):
        play(buffer)
        done.append(step(buffer, incarnation, b))
    play(buffer)
    second = buffer.start(1, 1, 0)
    assert (second.version, second.branch, second.published) == (1, 0, 3)
    with pytest.raises(Refused, match="fenced off"):
        buffer.finished(incarnation, 3, "applied")
    for b in (1, 2):
        answer = buffer.batch(0, second.incarnation, b)
        assert answer.batch is not None
        assert answer.batch.groups == done[b]
        assert len(buffer.share(answer, 0, 1)) == 4
        assert buffer.finished(second.incarnation, b, "applied") == b + 1
    assert buffer.batch(0, second.incarnation, 3).state == "ready"
    assert equation(buffer)["trained"] == 6


def test_tokens_ahead_of_the_learner_wait(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path)
    incarnation = learner(buffer)
    play(buffer)
    step(buffer, incarnation, 0)
    step(buffer, incarnation, 1)  # version 2, published
    play(buffer)  # tokens of version 2
    second = buffer.start(0, 0, None).incarnation
    assert buffer.batch(0, second, 0).state == "ready"
    buffer.finished(second, 0, "applied")
    assert equation(buffer)["waiting"] == 4  # not dropped although the learner is at version 1
    assert buffer.batch(0, second, 1).state == "ready"
    buffer.finished(second, 1, "applied")
    assert buffer.batch(0, second, 2).state == "ready"


def test_no_batch_holds_a_token_of_weights_that_the_learner_does_not_have_yet(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, groups_per_step=1)
    incarnation = learner(buffer)
    tickets = buffer.issue(0, "a", (0, 0), 4)[0]
    for ticket in tickets[:2]:
        put(buffer, trajectory(ticket, (0, 1)))  # version 1 reached the actor before its step was reported
    assert buffer.batch(0, incarnation, 0).state == "waiting"
    for ticket in tickets[2:]:
        put(buffer, trajectory(ticket, (0,)))
    assert step(buffer, incarnation, 0) == (1,)
    assert step(buffer, incarnation, 1) == (0,)


def test_a_batch_that_ends_otherwise_begins_a_branch(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path)
    incarnation = learner(buffer)
    for b in range(3):
        play(buffer)
        step(buffer, incarnation, b)
    play(buffer, credits=1)
    second = learner(buffer)
    buffer.batch(0, second, 0)
    assert buffer.finished(second, 0, "guard") == 0
    history = buffer.ledger.history
    assert (history.branch, history.published, len(history.line)) == (1, None, 1)
    old = equation(buffer, 0)
    assert old["dropped: guard"] == 2
    assert old["dropped: discarded_branch"] + old.get("waiting", 0) + 2 == old["issued"]
    assert all((g.newest or 0) == 0 for g in buffer.ledger.live.values())
    assert buffer.batch(0, second, 0).state == "skipped"
    with pytest.raises(Refused, match="the branch is 1"):
        buffer.published(second, 0, 0, "d")
    buffer.published(second, 1, 0, "d")
    tickets, _ = buffer.issue(0, "a", (1, 0), 99)
    assert {t.id.branch for t in tickets} == {1}
    assert {buffer.ledger.live[t.id.group].replaces is not None for t in tickets} == {True}


def test_fresh_releases_what_was_recorded_later(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path)
    incarnation = learner(buffer)
    play(buffer)
    step(buffer, incarnation, 0)
    late = buffer.issue(0, "a", (0, 1), 1)[0][0]
    started = buffer.start(0, 0, None, fresh=True)
    assert (started.branch, started.published) == (1, -1)
    assert equation(buffer, 0) == {"issued": 5, "waiting": 4, "in_flight": 1}
    assert put(buffer, trajectory(late, (1,))) == "late"
    assert buffer.batch(0, started.incarnation, 0).state == "ready"


def test_a_checkpoint_off_the_line_is_refused(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path)
    incarnation = learner(buffer)
    play(buffer)
    step(buffer, incarnation, 0)
    for b, version, branch in ((2, 2, 0), (1, 0, 0), (1, 1, 1)):
        with pytest.raises(Refused) as refused:
            buffer.start(b, version, branch)
        assert refused.value.code == "unknown_checkpoint"
    second = learner(buffer)
    buffer.batch(0, second, 0)
    buffer.finished(second, 0, "guard")
    with pytest.raises(Refused):
        buffer.start(1, 1, 0)  # that point was left: on branch 1 batch 0 was skipped
    assert buffer.start(1, 0, 1).branch == 1


def test_poison_is_skipped_and_too_many_skips_end_the_run(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, batch_retries=2, max_skipped=1)
    for expected in (None, None, 0, None, 1):
        incarnation = learner(buffer)
        answer = buffer.batch(0, incarnation, 0)
        if answer.state == "waiting":
            play(buffer)
            answer = buffer.batch(0, incarnation, 0)
        b = 0
        while answer.state == "skipped":
            b += 1
            answer = buffer.batch(0, incarnation, b)
            if answer.state == "waiting":
                play(buffer)
                answer = buffer.batch(0, incarnation, b)
        if expected == 1:
            assert (answer.state, answer.failed) == ("ended", True)
    assert equation(buffer)["dropped: poison"] == 4


def test_deaths_that_were_caused_do_not_count(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, batch_retries=2)
    play_first = learner(buffer)
    play(buffer)
    buffer.batch(0, play_first, 0)
    for _ in range(4):
        incarnation = learner(buffer, caused=True)
        assert buffer.batch(0, incarnation, 0).state == "ready"
    learner(buffer)
    buffer = reopen(buffer, tmp_path, batch_retries=2)
    incarnation = learner(buffer)
    assert buffer.batch(0, incarnation, 0).state == "ready"


def test_a_learner_that_somebody_is_about_to_kill_is_no_suspect(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, batch_retries=2)
    incarnation = learner(buffer)
    play(buffer)
    for _ in range(4):
        assert buffer.batch(0, incarnation, 0).state == "ready"
        buffer.caused()
        buffer = reopen(buffer, tmp_path, batch_retries=2)  # recorded: it outlives the buffer
        incarnation = learner(buffer)
    for _ in range(2):
        assert buffer.batch(0, incarnation, 0).state == "ready"
        incarnation = learner(buffer, publish=False)
    assert buffer.batch(0, incarnation, 0).state == "skipped"  # nobody caused these two


def test_a_run_killed_as_a_whole_suspects_no_batch(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, batch_retries=2)
    incarnation = learner(buffer)
    play(buffer)
    for _ in range(5):
        assert buffer.batch(0, incarnation, 0).state == "ready"
        buffer = reopen(buffer, tmp_path, batch_retries=2)
        incarnation = learner(buffer)
    assert buffer.batch(0, incarnation, 0).state == "ready"


def test_deaths_before_and_after_a_batch_was_trained_are_not_in_a_row(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, batch_retries=2)
    incarnation = learner(buffer)
    play(buffer)
    assert buffer.batch(0, incarnation, 0).state == "ready"  # it dies of something that passes
    incarnation = learner(buffer)
    for b in range(2):
        step(buffer, incarnation, b)
        play(buffer)
    buffer = reopen(buffer, tmp_path, batch_retries=2)  # the host restarts: not the batch's fault
    incarnation = learner(buffer)
    assert buffer.batch(0, incarnation, 0).state == "ready"  # and again something that passes
    started = buffer.start(0, 0, None)
    assert started.branch == 0
    assert buffer.batch(0, started.incarnation, 0).state == "ready"


def test_an_applied_batch_that_kills_when_redone_becomes_poison(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, batch_retries=2)
    incarnation = learner(buffer)
    for b in range(2):
        play(buffer)
        step(buffer, incarnation, b)
    for _ in range(2):
        incarnation = learner(buffer)
        assert buffer.batch(0, incarnation, 0).state == "ready"
    incarnation = learner(buffer, publish=False)
    assert buffer.ledger.history.branch == 1
    assert buffer.batch(0, incarnation, 0).state == "skipped"
    assert equation(buffer)["dropped: poison"] == 2


def test_a_fresh_start_takes_what_it_released_in_issue_order(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path)
    incarnation = learner(buffer)
    play(buffer)
    assert step(buffer, incarnation, 0) == (0, 1)
    started = buffer.start(0, 0, None, fresh=True)
    buffer.published(started.incarnation, 1, 0, "d")
    assert list(buffer.ledger.live) == [0, 1, 2, 3]
    assert step(buffer, started.incarnation, 0) == (0, 1)


def test_deaths_with_a_batch_that_was_released_are_not_held_against_the_one_in_its_place(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, batch_retries=2)
    incarnation = learner(buffer)
    play(buffer)
    for fresh in (False, True):
        assert buffer.batch(0, incarnation, 0).state == "ready"
        incarnation = learner(buffer, fresh=fresh)
    buffer.published(incarnation, 1, 0, "digest-0")
    step(buffer, incarnation, 0)
    for reopened in (False, True):
        if reopened:
            buffer = reopen(buffer, tmp_path, batch_retries=2)
        incarnation = learner(buffer, caused=True, publish=False)
        assert buffer.batch(0, incarnation, 0).state == "ready"
    assert buffer.ledger.history.branch == 1


def test_a_fresh_start_of_a_solved_run_filters_as_often_as_any(tmp_path: Path) -> None:
    options: dict[str, Any] = {"filters": (zero_variance,), "filter_max_ratio": 1.0, "end_when_starved": True}
    buffer = open_buffer(tmp_path, **options)
    incarnation = learner(buffer)
    play(buffer, credits=2, reward=1.0)
    play(buffer, credits=4)
    started = buffer.start(0, 0, None, fresh=True)
    buffer.published(started.incarnation, 1, 0, "d")
    buffer = reopen(buffer, tmp_path, **options)
    play(buffer, credits=4, reward=1.0)
    assert equation(buffer, 1) == {"issued": 2, "dropped: filtered": 2}
    assert not buffer.tickets.filtering.starved, "one was dropped before the fork"
    play(buffer, credits=2, reward=1.0)
    incarnation = started.incarnation
    assert buffer.batch(0, incarnation, 0).state == "ended"
    for _ in range(2):
        started = buffer.start(0, 0, None, fresh=True)
        buffer = reopen(buffer, tmp_path, **options)
        assert buffer.batch(0, started.incarnation, 0).state == "ready"
