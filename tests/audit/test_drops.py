"""No reason is believed: every end of a group follows from what is recorded beside it, and another one is noticed."""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from asyncrl.audit.checks.drops import DROPS, drops
from asyncrl.audit.command import audit
from asyncrl.audit.reading import read_ledger
from asyncrl.audit.witnesses import Bounds
from asyncrl.buffer.core import Buffer
from asyncrl.buffer.selection import zero_variance
from asyncrl.config import Config
from asyncrl.run_folder import RunFolder
from tests.audit.real_run import fake_actor
from tests.audit.test_audit import ask, sql
from tests.buffer.fakes import learner, open_buffer, play, put, step, trajectory
from tests.buffer.processes import BufferProcess

END = "ended_batch = (SELECT count(*) FROM batches)"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run whose processes were stopped while groups were waiting. Not to be changed."""
    process = BufferProcess(tmp_path_factory.mktemp("stopped") / "run")
    process.start()
    try:
        client, incarnation = process.learner()
        with fake_actor(process.run, "actor-0"):
            assert client.batch(incarnation, 0, 0, 1, wait_s=20.0).state == "ready"
            client.published(incarnation, 0, client.finished(incarnation, 0, "applied"), "digest-1")
            until = time.monotonic() + 20
            while not client.status()["equation"]["0"].get("waiting") and time.monotonic() < until:
                time.sleep(0.05)
    finally:
        process.close()
    return process.run


@pytest.fixture
def waiting(stopped: RunFolder, tmp_path: Path) -> RunFolder:
    shutil.copytree(stopped.path, tmp_path / "run")
    return RunFolder.existing(tmp_path / "run")


@pytest.mark.parametrize("reason", ["stale", "filtered", "env_error", "wait_deadline", "guard", "discarded_branch"])
@pytest.mark.parametrize("whole", [False, True], ids=["the reason alone", "with all that goes with it"])
def test_a_reason_that_nothing_supports_is_noticed(
    waiting: RunFolder, reason: str, whole: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run = waiting
    assert audit(run) == 0, capsys.readouterr().out
    assert ask(run, "SELECT count(*) FROM groups WHERE state = 'waiting'")[0][0]
    back = int(reason in ("stale", "wait_deadline", "discarded_branch"))
    filling = ", filling = (SELECT count(*) FROM batches)" if reason == "filtered" else ""
    more = f", {END}, put_back = {back}{filling}" if whole else ""
    sql(run, f"UPDATE groups SET state = 'dropped', reason = ?{more} WHERE state = 'waiting'", reason)
    assert audit(run) == 1
    assert f"drops: group {ask(run, 'SELECT min(number) FROM groups WHERE reason IS NOT NULL')[0][0]} is dropped: " in (
        capsys.readouterr().out
    )


def some_stale(folder: Path) -> Buffer:
    """Group 3 is too old in part when version 2 is made."""
    buffer = open_buffer(folder)
    incarnation = learner(buffer)
    for ticket in buffer.issue(0, "actor-0", (0, 0), 8)[0]:
        if ticket.id.group < 2 or (ticket.id.group, ticket.id.index) == (3, 0):
            put(buffer, trajectory(ticket, (0,), float(ticket.id.index)))
    step(buffer, incarnation, 0)
    play(buffer)
    for ticket in buffer.issue(0, "actor-0", (0, 1), 8)[0]:
        put(buffer, trajectory(ticket, (1,), float(ticket.id.index)))
    step(buffer, incarnation, 1)
    return buffer


def some_filtered(folder: Path) -> Buffer:
    """Two groups are dropped, then the allowance is used up: the others are kept with weight 0."""
    buffer = open_buffer(folder, filters=(zero_variance,), filter_max_ratio=1.0)
    learner(buffer)
    play(buffer, reward=1.0)
    return buffer


def some_failed(folder: Path) -> Buffer:
    buffer = open_buffer(folder, env_retries=1)
    learner(buffer)
    for _ in range(2):
        (ticket,) = buffer.issue(0, "actor-0", (0, 0), 1)[0]
        buffer.fail("actor-0", ticket.id, ticket.attempt, "env_error", "away")
    return buffer


def some_awaited(folder: Path) -> Buffer:
    buffer = open_buffer(folder, over_age="wait", max_staleness=0, wait_s=5.0)
    incarnation = learner(buffer)
    tickets = buffer.issue(0, "actor-0", (0, 0), 4)[0]
    for ticket in tickets[:3]:
        put(buffer, trajectory(ticket, (0,), float(ticket.id.index)))
    for now in (0.0, 10.0):
        assert buffer.batch(now, incarnation, 0).state == "waiting"
    return buffer


def some_skipped(folder: Path) -> Buffer:
    buffer = open_buffer(folder)
    incarnation = learner(buffer)
    play(buffer)
    buffer.batch(0, incarnation, 0)
    buffer.finished(incarnation, 0, "guard")
    return buffer


def some_discarded(folder: Path) -> Buffer:
    """One that was complete and of a later version, and one in flight."""
    buffer = open_buffer(folder)
    incarnation = learner(buffer)
    play(buffer)
    step(buffer, incarnation, 0)
    play(buffer, credits=3)
    learner(buffer, fresh=True)
    return buffer


def some_used_twice(folder: Path) -> Buffer:
    """Two groups have both their uses, two wait for the second."""
    buffer = open_buffer(folder, max_uses=2)
    incarnation = learner(buffer)
    play(buffer, credits=4)
    for b in range(2):
        step(buffer, incarnation, b)
    play(buffer, credits=4)
    step(buffer, incarnation, 2)
    return buffer


def some_too_old_for_another_use(folder: Path) -> Buffer:
    buffer = open_buffer(folder, max_uses=3)
    incarnation = learner(buffer)
    play(buffer, credits=4)
    for b in range(2):
        step(buffer, incarnation, b)
    return buffer


def some_kept_under_a_small_ratio(folder: Path) -> Buffer:
    buffer = open_buffer(folder, filters=(zero_variance,), filter_max_ratio=0.0)
    learner(buffer)
    play(buffer, reward=1.0)
    return buffer


def some_scored_together(folder: Path) -> Buffer:
    """The actor that scored group 0 was lost between two puts."""
    buffer = open_buffer(folder, group_scored=True)
    learner(buffer)
    tickets = buffer.issue(0, "actor-0", (0, 0), 2)[0]
    put(buffer, trajectory(tickets[0], (0,)))
    buffer.joined("actor-0")
    return buffer


def some_scored_together_before_a_branch(folder: Path) -> Buffer:
    """The branch took the ticket from the actor that scored group 0, which puts in vain."""
    buffer = open_buffer(folder, group_scored=True, env_retries=0)
    learner(buffer)
    tickets = buffer.issue(0, "actor-0", (0, 0), 2)[0]
    put(buffer, trajectory(tickets[0], (0,)))
    learner(buffer, fresh=True)
    assert put(buffer, trajectory(tickets[1], (0,))) == "late"
    return buffer


Changes = dict[str, Any]
FILTERED: Changes = {"filters": (zero_variance,), "filter_max_ratio": 1.0}
HISTORIES: dict[str, tuple[Callable[[Path], Buffer], Changes, str]] = {
    "stale": (some_stale, {}, "stale"),
    "filtered": (some_filtered, FILTERED, "filtered"),
    "env_error": (some_failed, {"env_retries": 1}, "env_error"),
    "wait_deadline": (some_awaited, {"over_age": "wait", "max_staleness": 0}, "wait_deadline"),
    "guard": (some_skipped, {}, "guard"),
    "discarded_branch": (some_discarded, {}, "discarded_branch"),
    "max_uses 2": (some_used_twice, {"max_uses": 2}, ""),
    "max_uses 3": (some_too_old_for_another_use, {"max_uses": 3}, ""),
    "no allowance": (some_kept_under_a_small_ratio, {**FILTERED, "filter_max_ratio": 0.0}, ""),
    "scored together": (some_scored_together, {"group_scored": True}, "env_error"),
    "scored together, void": (
        some_scored_together_before_a_branch,
        {"group_scored": True, "env_retries": 0},
        "env_error",
    ),
}


def found(folder: Path, **changes: Any) -> list[str]:
    bounds = {"groups_per_step": 2, "max_uses": 1, "max_staleness": 1, "over_age": "drop", "mask_min_kept": 0.5}
    return list(drops(read_ledger(folder), (Bounds(**(bounds | changes)),)))


def made(folder: Path, what: str) -> Changes:
    """Leaves the ledger of a history; gives the rules under which it was made."""
    make, changes, reason = HISTORIES[what]
    buffer = make(folder)
    buffer.commit(0)
    buffer.database.close()
    if reason:
        assert any(group.reason == reason for group in read_ledger(folder).groups.values()), "the history has none"
    return changes


def tamper(folder: Path, statement: str) -> None:
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as db, db:
        assert db.execute(statement).rowcount > 0, "nothing was tampered with"


@pytest.mark.parametrize("what", HISTORIES)
def test_what_was_dropped_for_its_reason_passes(tmp_path: Path, what: str) -> None:
    assert found(tmp_path, **made(tmp_path, what)) == []


@pytest.mark.parametrize("what", HISTORIES)
@pytest.mark.parametrize("reason", ["stale", "filtered", "env_error", "wait_deadline", "guard", "discarded_branch"])
def test_another_reason_does_not(tmp_path: Path, what: str, reason: str) -> None:
    changes, was = made(tmp_path, what), HISTORIES[what][2]
    if was and was != reason:
        tamper(tmp_path, f"UPDATE groups SET reason = '{reason}' WHERE reason = '{was}'")
        assert found(tmp_path, **changes) != []


TAMPERINGS: dict[str, tuple[str, str, str, Changes]] = {
    "ended_groups_say_when": ("stale", "UPDATE groups SET ended_batch = NULL WHERE reason = 'stale'", "is None", {}),
    "groups_ended_on_a_branch_that_was_there": (
        "stale", "UPDATE groups SET ended_branch = 1 WHERE reason = 'stale'", "branch 1, which cannot be where it", {},
    ),
    "groups_ended_on_a_branch_that_was_there, of those before a branch": (
        "discarded_branch", "UPDATE groups SET ended_branch = 0 WHERE reason = 'discarded_branch'",
        "no later branch that begins there", {},
    ),
    "stale_groups_were_too_old": (
        "stale", "UPDATE groups SET ended_batch = 1 WHERE reason = 'stale'",
        "was within the bound: its oldest stored version is 0, the learner's was at most 1 at batch 1", {},
    ),
    "filtered_groups_are_rejected": (
        "filtered", "UPDATE trajectories SET reward = 0.5 WHERE idx = 0", "no filter in buffer.filters rejects", {},
    ),
    "filtered_groups_fit_the_allowance": (
        "filtered", "UPDATE groups SET state = 'dropped', reason = 'filtered', ended_batch = 0, filling = 0",
        "4 groups are dropped: filtered while batch 0", {},
    ),
    "failed_groups_have_failed_attempts": (
        "env_error", "DELETE FROM attempts WHERE attempt = 1", "no ticket of it has more failed attempts", {},
    ),
    "awaited_groups_were_not_there": (
        "wait_deadline", "DELETE FROM attempts WHERE grp = 1", "no ticket of it was issued", {},
    ),
    "awaited_groups_were_not_there, under drop": (
        "wait_deadline", "UPDATE groups SET size = size", "over_age is drop, which waits for no group",
        {"over_age": "drop"},
    ),
    "skipped_groups_ended_with_their_batch": (
        "guard", "UPDATE groups SET ended_batch = 2 WHERE reason = 'guard'", "at batch 2, and the batch before", {},
    ),
    "discarded_groups_were_left_behind": (
        "discarded_branch", f"UPDATE trajectories SET versions = x'{bytes(8).hex()}0100000000000000'",
        "no later branch that begins there", {},
    ),
    "trained_groups_have_no_use_left": (
        "max_uses 2", "UPDATE groups SET state = 'trained', ended_batch = 3 WHERE state = 'waiting' AND uses = 1",
        "after 1 uses, and could be used again", {},
    ),
    "waiting_groups_have_a_use_left": (
        "max_uses 2", "UPDATE groups SET state = 'waiting', ended_batch = NULL WHERE uses = 2",
        "was used 2 times: no further use", {},
    ),
    "prompts_go_back_as_the_reason_says": (
        "stale", "UPDATE groups SET put_back = 1 WHERE reason IS NULL", "its prompt was put back", {},
    ),
    "weights_follow_from_filters": (
        "filtered", "UPDATE groups SET weight = 1", "with weight 1, which does not follow from buffer.filters", {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("check", TAMPERINGS)
def test_each_check_notices(tmp_path: Path, check: str) -> None:
    what, statement, says, other = TAMPERINGS[check]
    changes = made(tmp_path, what)
    tamper(tmp_path, statement)
    assert any(says in problem for problem in found(tmp_path, **(changes | other)))


def test_no_check_is_without_its_tampering() -> None:
    assert {check.partition(",")[0] for check in TAMPERINGS} == {check.__name__ for check in DROPS}


@pytest.mark.system
def test_a_run_that_was_resumed_with_other_rules_is_checked_against_each(run: RunFolder) -> None:
    """What an earlier configuration dropped stays explained."""
    before = run.load_config()
    changed = before.model_dump(mode="json")
    changed["buffer"] |= {"filters": ["zero_variance"], "filter_max_ratio": 0.0, "max_staleness": 3}
    run.save_config(Config.model_validate(changed))
    run.save_config(Config.model_validate(changed))
    assert run.earlier_configs() == [before], "the same config is kept once"
    assert audit(run) == 0
    rewards = "UPDATE trajectories SET reward = 1 WHERE grp = 0"
    sql(run, rewards)
    sql(run, "UPDATE groups SET weight = 0 WHERE number = 0")
    said = [text for text in _drops(run) if "weight 0" in text]
    assert said == [], "the later config rejects it and allows no drop"
    (run.configs / "0000.yaml").rename(run.config)
    assert any("weight 0" in text for text in _drops(run)), "no config of the run has a filter"


def _drops(run: RunFolder) -> list[str]:
    rules = [Bounds.of(config) for config in (*run.earlier_configs(), run.load_config())]
    return list(drops(read_ledger(run.buffer), rules))
