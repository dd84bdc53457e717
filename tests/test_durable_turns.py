"""Actors are killed in the middle of episodes of twenty turns, with the real processes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from asyncrl.audit.command import audit
from asyncrl.audit.ledger import LedgerRows
from asyncrl.audit.reading import read_ledger
from asyncrl.audit.replay import replay
from asyncrl.buffer.tickets.lengths import LEAST
from tests.counting_env import TURNS, sampled_again
from tests.long_run import START_S, LongRun, exact
from tests.waiting import until


@pytest.mark.system
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("env", "turns", "score"),
    [
        pytest.param("WithSnapshots", "on", ""),
        pytest.param("agent", "on", "", marks=pytest.mark.slow),
        pytest.param("WithSnapshots", "on", "tests.counting_env:compare", marks=pytest.mark.slow),
        pytest.param("Again", "on", "", marks=pytest.mark.slow),
        pytest.param("WithSnapshots", "off", "", marks=pytest.mark.slow),
        pytest.param("agent", "off", "", marks=pytest.mark.slow),
    ],
)
def test_an_actor_killed_in_the_middle_of_its_episodes_costs_no_turn(
    long_run: Any, env: str, turns: str, score: str
) -> None:
    run = long_run(env, turns, steps=2, score=score)
    for kill in range(2):
        # Twelve turns of four episodes: the middle, wherever each of them is.
        enough = (4 * 12, 4 * 12 + 4 * TURNS)[kill]
        assert until(lambda enough=enough: len(run.steps()) >= enough, START_S), run.out
        run.kill("actor-0")
    assert run.launcher.wait(START_S) == 0, run.out
    trajectories = exact(run.run, agent=env == "agent")
    assert len(trajectories) >= 8
    again = sampled_again(run.steps())
    if score:
        assert [t.rewards["group"] for t in trajectories] == [float(t.id.index) for t in trajectories]
    print(f"{env}, turns {turns} {score}: {again} tokens sampled again after 2 kills, {again / 2:.0f} a kill")
    if turns == "off":
        assert again > 0, "the measure notices what is sampled again"
        return
    assert again == 0
    ended = {row["ended"] for row in read_ledger(run.run.buffer).tables["turns"]}
    assert "continued" in ended
    assert not ended & {"failed", "diverged", "lost", "stale"}
    assert any(t.attempt for t in trajectories), "some episodes went on in another attempt"


def durable_groups(ledger: LedgerRows) -> list[int]:
    return [group.number for group in ledger.groups.values() if group.durable]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("score", ["", "tests.counting_env:compare"], ids=["", "group score"])
def test_auto_begins_to_record_and_from_there_no_turn_is_lost(long_run: Any, score: str) -> None:
    """`buffer.turns: auto`, with episodes that all take longer than `turns_auto_s`. Under a group score the tickets of
    a group go to the next actor together."""
    run: LongRun = long_run(
        "WithSnapshots", "auto", steps=9, score=score, actors={"count": 2}, buffer={"turns_auto_s": 1.0, "capacity": 16}
    )

    def in_their_middle() -> bool:
        """Two groups whose turns are recorded have as many as half of theirs."""
        rows = read_ledger(run.run.buffer).tables["turns"]
        return sum(row["form"] == "answer" and row["ended"] is None for row in rows) >= 4 * TURNS // 2

    assert until(lambda: bool(run.steps()), START_S), run.out
    assert until(in_their_middle, START_S), run.out
    for role in ("actor-0", "actor-1"):
        run.kill(role)
    assert run.launcher.wait(START_S) == 0, run.out
    exact(run.run)
    ledger = read_ledger(run.run.buffer)
    durable = durable_groups(ledger)
    first = min(durable)
    assert first >= LEAST // 4, "ten episodes are over before"
    assert durable == [number for number in ledger.groups if number >= first], "it stays on"
    assert {row["grp"] for row in ledger.tables["turns"]} == set(durable), "fixed for all tickets of a group"
    for group in ledger.groups.values():
        assert group.lengths is not None
        assert (group.lengths >= LEAST) == group.durable, "all of them took long"
    ended = Counter(row["ended"] for row in ledger.tables["turns"])
    resumed = {(row["grp"], row["idx"]) for row in ledger.tables["turns"] if row["attempt"] == 0} & {
        key for key, row in ledger.trajectories.items() if row.attempt > 0
    }
    assert resumed, "some went on with another actor"
    assert not ended.keys() & {"anew", "failed", "diverged", "lost", "stale"}
    tasks = {ledger.groups[number].task_id for number in durable}
    steps = [step for step in run.steps() if step.key.rpartition("/")[0] in tasks]
    assert sampled_again(steps) == 0
    if score:
        for number in durable:
            stored = ledger.members.get(number, ())
            assert len({row.actor for row in stored}) <= 1, f"group {number} was played by several actors"
    print(f"auto {score}: recorded from group {first} on; {len(resumed)} episodes went on; {dict(ended)}")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_resumed_and_compacted_episodes_are_trained_again_bit_for_bit(
    long_run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The group score makes the rewards of a group unequal, so that every step changes the weights."""
    run: LongRun = long_run(
        "WithSnapshots", "on", steps=3, score="tests.counting_env:compare",
        env={"max_turns": 2 * TURNS, "compact": 0.4, "compact_request": "sum up"},
    )  # fmt: skip
    assert until(lambda: len(run.steps()) >= 4 * 12, START_S), run.out
    run.kill("actor-0")
    assert run.launcher.wait(START_S) == 0, run.out
    trajectories = exact(run.run, summaries=True)
    ledger = read_ledger(run.run.buffer)
    summaries = [row for row in ledger.tables["turns"] if row["form"] == "summary"]
    assert "continued" in {row["ended"] for row in summaries}
    resumed = [t for t in trajectories if t.attempt]
    assert any(len(t.rows) > 1 for t in resumed), "an episode with a summary went on"
    assert audit(run.run) == 0
    assert len({digest for digest in ledger.published.values()}) == 4, "every step changed the weights"
    capsys.readouterr()
    assert replay(run.run) == 0
    assert "every one bit-identical" in capsys.readouterr().out
