"""Groups that need a teacher's scores: who gets them, and what becomes of what comes back."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer.client.messages import GroupLease
from asyncrl.buffer.core import Buffer
from asyncrl.buffer.rules import Refused
from asyncrl.buffer.selection import zero_variance
from asyncrl.wire.teacher_scores import from_record
from tests.buffer.fakes import equation, learner, open_buffer, play, put, step, trajectory
from tests.buffer.scoring.fakes import SCORED, bring, lease, score_all, scores


def opened(folder: Path, **rules: Any) -> tuple[Buffer, int]:
    buffer = open_buffer(folder, **(SCORED | rules))
    return buffer, learner(buffer)


def test_a_batch_waits_for_the_scores_of_its_groups(tmp_path: Path) -> None:
    buffer, incarnation = opened(tmp_path)
    play(buffer, 8)
    answer = buffer.batch(0.0, incarnation, 0)
    assert (answer.state, "4 are not scored yet (no scorer has asked" in answer.why) == ("waiting", True), answer.why
    given = lease(buffer, 2)
    assert [each.group for each in given] == [0, 1], "issue order"
    made = [scores(buffer, each) for each in given]
    assert [bring(buffer, each) for each in made] == ["stored", "stored"]
    answer = buffer.batch(0.0, incarnation, 0)
    assert answer.batch is not None
    assert answer.batch.groups == (0, 1)
    stored = buffer.scores(answer, 0, 1)
    assert [digest for _, digest in stored] == [each.digest() for each in made]
    assert [from_record(record).digest() for record, _ in stored] == [each.digest() for each in made]
    used = list(buffer.database.read("SELECT serial, grp, digest FROM score_uses ORDER BY 1, 2"))
    assert used == [(answer.batch.serial, n, each.digest()) for n, each in enumerate(made)]
    assert equation(buffer)["waiting"] == 2, "unscored groups are waiting"


def test_without_a_teacher_on_servers_nothing_is_scored(tmp_path: Path) -> None:
    buffer, incarnation = opened(tmp_path, scored=False)
    play(buffer, 4)
    with pytest.raises(Refused, match="takes no scores"):
        lease(buffer)
    assert step(buffer, incarnation, 0) == (0, 1)
    assert not list(buffer.database.read("SELECT * FROM score_uses"))


def test_a_scorer_is_heard_after_the_buffer_stood_still(tmp_path: Path) -> None:
    buffer, _ = opened(tmp_path, lease_s=10.0)
    play(buffer, 2)
    (first,) = lease(buffer, now=0.0)
    buffer.tick(40.0, late=39.0)
    assert lease(buffer, now=40.0, scorer="scorer-1") == []
    assert buffer.scoring.renew(40.0, "scorer-0", [(first.group, first.attempt)], (), "") == []


def test_a_lapsed_lease_is_issued_again_and_the_first_scores_win(tmp_path: Path) -> None:
    buffer, _ = opened(tmp_path, lease_s=10.0)
    play(buffer, 2)
    (first,) = lease(buffer, now=0.0)
    assert lease(buffer, now=5.0, scorer="scorer-1") == []
    lease(buffer, now=5.0, held=[first])
    buffer.tick(12.0)
    assert lease(buffer, now=12.0, scorer="scorer-1") == [], "the renewed lease holds"
    buffer.tick(15.0)
    (second,) = lease(buffer, now=15.0, scorer="scorer-1")
    assert (second.group, second.attempt) == (first.group, 1)
    assert buffer.scoring.renew(15.0, "scorer-0", [(first.group, first.attempt)], (), "") == [(first.group, 0)]
    assert bring(buffer, scores(buffer, first, salt=1)) == "stored", "the group still needs them"
    assert bring(buffer, scores(buffer, first, salt=1)) == "duplicate"
    assert bring(buffer, scores(buffer, second, "scorer-1")) == "late"
    assert lease(buffer, now=15.0) == []
    ended = list(buffer.database.read("SELECT attempt, scorer, ended FROM scorings ORDER BY serial"))
    assert ended == [(0, "scorer-0", "scored"), (1, "scorer-1", "late")]


def test_equal_numbers_of_another_attempt_are_late(tmp_path: Path) -> None:
    """The scorer writes `stored` only for what the ledger has under its own attempt."""
    buffer, _ = opened(tmp_path, lease_s=10.0)
    play(buffer, 2)
    (first,) = lease(buffer, now=0.0)
    buffer.tick(15.0)
    (second,) = lease(buffer, now=15.0, scorer="scorer-1")
    assert bring(buffer, scores(buffer, first)) == "stored"
    assert bring(buffer, scores(buffer, second, "scorer-1")) == "late"
    ended = list(buffer.database.read("SELECT attempt, ended FROM scorings ORDER BY serial"))
    assert ended == [(0, "scored"), (1, "late")]


def test_a_group_that_is_given_back_and_that_of_a_restarted_scorer_are_issued_again(tmp_path: Path) -> None:
    buffer, _ = opened(tmp_path)
    play(buffer, 4)
    one, two = lease(buffer)
    buffer.scoring.renew(0.0, "scorer-0", [(two.group, two.attempt)], [(one.group, one.attempt)], "")
    assert [each.group for each in lease(buffer, scorer="scorer-1")] == [one.group]
    buffer.scoring.joined("scorer-0")
    assert [each.group for each in lease(buffer, scorer="scorer-1")] == [two.group]


def test_filters_judge_before_scoring_and_a_dropped_group_is_taken_back(tmp_path: Path) -> None:
    buffer, _ = opened(tmp_path, filters=(zero_variance,))
    tickets, _ = buffer.issue(0.0, "actor-0", (0, 0), 4)
    for ticket in tickets:
        put(buffer, trajectory(ticket, (0,), 1.0 if ticket.id.group == 0 else float(ticket.id.index)))
    assert [each.group for each in lease(buffer)] == [1], "group 0 was filtered"
    buffer.tickets.drop(buffer.ledger.live[1], "stale")
    buffer.tick(0.0)
    assert buffer.scoring.leases == {}
    assert list(buffer.database.read("SELECT grp, ended FROM scorings")) == [(1, "revoked")]


def test_wait_s_stands_still_while_no_scorer_answers(tmp_path: Path) -> None:
    buffer, incarnation = opened(tmp_path, over_age="wait", wait_s=5.0, max_staleness=0, lease_s=2.0)
    play(buffer, 4)
    (first, *_) = lease(buffer, 1, now=0.0)
    assert bring(buffer, scores(buffer, first)) == "stored"
    for now in (1.0, 50.0, 1000.0):
        assert buffer.batch(now, incarnation, 0).state == "waiting"
    assert equation(buffer).get("dropped: wait_deadline", 0) == 0, "no scorer has answered since 2.0"
    for now in range(1000, 1010):
        buffer.scoring.renew(float(now), "scorer-0", (), (), "")
        buffer.batch(float(now), incarnation, 0)
    assert equation(buffer)["dropped: wait_deadline"] == 1, "it answered for more than wait_s"


def test_a_silent_teacher_does_not_count_as_an_answer(tmp_path: Path) -> None:
    buffer, incarnation = opened(tmp_path, lease_s=5.0)
    play(buffer, 4)
    for now in range(20):
        buffer.scoring.renew(float(now), "scorer-0", (), (), "http://t: connection refused")
    assert buffer.scoring.wait_clock(20.0) == 0.0
    assert "http://t: connection refused" in buffer.batch(20.0, incarnation, 0).why
    assert buffer.status()["teacher_silent"] == "http://t: connection refused"


def test_a_scorer_whose_teacher_fell_silent_stops_the_clock_at_once(tmp_path: Path) -> None:
    buffer, _ = opened(tmp_path, lease_s=30.0)
    for scorer in ("scorer-0", "scorer-1"):
        buffer.scoring.renew(0.0, scorer, (), (), "")
    buffer.scoring.renew(1.0, "scorer-0", (), (), "http://t: connection refused")
    assert buffer.scoring.wait_clock(2.0) == 2.0, "the other one answers"
    assert buffer.scoring.answering
    buffer.scoring.renew(2.0, "scorer-1", (), (), "http://t: connection refused")
    assert buffer.scoring.wait_clock(20.0) == 2.0
    assert not buffer.scoring.answering


def test_earliest_deadline_first_under_wait(tmp_path: Path) -> None:
    buffer, _ = opened(tmp_path, over_age="wait", max_staleness=3)
    tickets, _ = buffer.issue(0.0, "actor-0", (0, 0), 6)
    buffer.ledger.history.current.next_batch = 0  # type: ignore[union-attr]
    for ticket in tickets:
        version = 0 if ticket.id.group == 2 else 1
        made = trajectory(ticket, (version,))
        buffer.tickets.validity.check_versions = lambda *_: None  # type: ignore[method-assign]
        put(buffer, made)
    assert [each.group for each in lease(buffer)] == [2, 0, 1]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"teacher": "t2"}, "another_teacher"),
        ({"scorer": "scorer-9"}, "wrong_scorer"),
        ({"group": 77}, "unknown_group"),
    ],
)
def test_what_is_refused(tmp_path: Path, change: dict[str, Any], code: str) -> None:
    buffer, _ = opened(tmp_path)
    play(buffer, 4)
    one, two = lease(buffer)
    assert bring(buffer, scores(buffer, one)) == "stored"
    with pytest.raises(Refused) as refused:
        bring(buffer, replace(scores(buffer, two), **change))
    assert refused.value.code == code


def test_scores_of_other_lengths_and_of_fewer_words_are_refused(tmp_path: Path) -> None:
    buffer, _ = opened(tmp_path)
    play(buffer, 2)
    (given,) = lease(buffer)
    with pytest.raises(Refused, match=r"have 1 words a token, learner\.teacher\.k is 2"):
        bring(buffer, scores(buffer, given, k=1))
    made = scores(buffer, given)
    longer = tuple(replace(s, ids=s.ids.repeat(2, 0), logprobs=s.logprobs.repeat(2, 0), sampled=s.sampled.repeat(2))
                   for s in made.scores)  # fmt: skip
    with pytest.raises(Refused, match="its trajectories have"):
        bring(buffer, replace(made, scores=longer))


def test_scores_survive_a_kill_and_a_fork_and_go_with_the_payload(tmp_path: Path) -> None:
    buffer, incarnation = opened(tmp_path / "live", max_staleness=3)
    play(buffer, 8)
    assert score_all(buffer) == [0, 1, 2, 3]
    assert step(buffer, incarnation, 0) == (0, 1)
    buffer.commit(0.0)
    buffer.database.close()
    buffer = open_buffer(tmp_path / "live", max_staleness=3, **SCORED)
    assert buffer.scoring.waiting() == []
    incarnation = learner(buffer, 0, 0, branch=0, fresh=True)
    assert buffer.scoring.waiting() == [], "the groups of the batch that was left wait again, with their scores"
    assert step(buffer, incarnation, 0) == (0, 1)
    for b, path in enumerate((tmp_path / "step-1", tmp_path / "step-2"), 1):
        path.mkdir()
        assert buffer.checkpointed(0.0, incarnation, b, b, path)
        if b == 1:
            step(buffer, incarnation, 1)
    segments = {int(p.stem) for p in (tmp_path / "step-1" / "buffer" / "payloads").glob("*.segment")}
    needed = {s for (s,) in buffer.database.read("SELECT segment FROM scores WHERE grp IN (2, 3)")}
    assert needed <= segments, "the snapshot holds the scores that a resume needs"


def test_scores_that_the_disk_lost_are_asked_for_again(tmp_path: Path) -> None:
    buffer, _ = opened(tmp_path)
    play(buffer, 4)
    buffer.commit(0.0)
    buffer.database.payloads.seal()
    score_all(buffer)
    buffer.commit(0.0)
    last = buffer.database.payloads.path(buffer.database.payloads.current)
    before = scores(buffer, GroupLease(0, 1, 0, tuple(r.digest for r in buffer.ledger.live[1].trajectories)))
    buffer.database.close()
    with last.open("r+b") as file:
        file.truncate(last.stat().st_size - 5)
    buffer = open_buffer(tmp_path, **SCORED)
    assert [(lost.group, lost.index) for lost in buffer.losses.pending] == [(1, -1)]
    assert buffer.lost_to_disk == 0, "no episode is played again"
    incarnation = learner(buffer, publish=False)
    assert bring(buffer, before) == "late", "what the lost attempt brought comes under another one"
    assert [each.group for each in lease(buffer)] == [1]
    assert [ended for (ended,) in buffer.database.read("SELECT ended FROM scorings WHERE grp = 1")] == ["lost", None]
    assert incarnation == 2


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_no_group_is_used_unscored_and_none_is_scored_twice(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    rules = SCORED | {"lease_s": 3.0, "max_staleness": 2}
    buffer, incarnation, now, b = *opened(tmp_path, **rules), 0.0, 0
    held: dict[str, list[Any]] = {"scorer-0": [], "scorer-1": []}
    for _ in range(150):
        now += rng.random()
        scorer = rng.choice(sorted(held))
        match rng.choice(["play", "lease", "bring", "bring", "batch", "tick", "kill", "join", "return", "again"]):
            case "play":
                play(buffer, rng.randint(1, 6), now=now)
            case "lease":
                held[scorer] += lease(buffer, rng.randint(1, 3), now, scorer)
            case "bring" if held[scorer]:
                one = held[scorer].pop(rng.randrange(len(held[scorer])))
                assert bring(buffer, scores(buffer, one, scorer, rng.randint(0, 1))) in ("stored", "late", "duplicate")
            case "again" if held[scorer]:
                one = rng.choice(held[scorer])
                bring(buffer, scores(buffer, one, scorer))
            case "batch" if buffer.batch(now, incarnation, b).state == "ready":
                step(buffer, incarnation, b, now)
                b += 1
            case "tick":
                buffer.tick(now)
            case "join":
                buffer.scoring.joined(scorer)
            case "return" if held[scorer]:
                one = held[scorer].pop()
                buffer.scoring.renew(now, scorer, (), [(one.group, one.attempt)], "")
            case "kill":
                buffer.commit(now)
                buffer.database.close()
                buffer = open_buffer(tmp_path, now, **rules)
    buffer.commit(now)
    read = buffer.database.read
    assert not list(read("SELECT grp FROM uses EXCEPT SELECT grp FROM score_uses"))
    assert not list(read("SELECT u.grp FROM score_uses u JOIN scores s ON s.grp = u.grp WHERE s.digest != u.digest"))
    twice = read("SELECT grp FROM scorings WHERE ended = 'scored' GROUP BY grp HAVING count(*) > 1")
    assert not list(twice)
    assert list(read("SELECT grp, attempt FROM scores ORDER BY 1")) == list(
        read("SELECT grp, attempt FROM scorings WHERE ended = 'scored' ORDER BY 1")
    )
    equation(buffer)
