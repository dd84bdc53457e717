"""Actors, their hosts, the buffer, its host and whole launches are killed at random turns of episodes of twenty turns,
with the real processes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from contextlib import closing
from itertools import pairwise
from operator import attrgetter, itemgetter
from typing import Any

import pytest

from asyncrl.audit.payloads import PayloadFiles
from asyncrl.audit.reading import read_ledger
from asyncrl.audit.summary import figures
from asyncrl.audit.witnesses import gather
from asyncrl.run_folder import RunFolder
from tests.counting_env import TURNS, carried_out_again
from tests.long_run import START_S, LongRun, Played, exact, none_was_sampled_twice
from tests.waiting import until

WAYS = {
    "actor": 9,
    "host of an actor": 4,
    "actor leaves": 4,
    "buffer": 6,
    "launcher": 2,
    "stopped": 1,
    "branch": 2,
    "fork": 2,
}
"""Ways to interrupt a run, with the weights by which they are drawn."""


def drawn(rng: random.Random, count: int) -> list[str]:
    """Each way once, then by their weights."""
    first = rng.sample(list(WAYS), len(WAYS))
    return [*first, *rng.choices(list(WAYS), list(WAYS.values()), k=count)][:count]


def interrupt(run: LongRun, way: str, rng: random.Random) -> None:
    actor = f"actor-{rng.randrange(2)}"
    match way:
        case "actor":
            run.kill(actor)
        case "host of an actor":
            run.kill(actor, whole=True)
        case "actor leaves":
            run.kill(actor, of=signal.SIGTERM)
        case "buffer":
            run.kill("buffer")
        case "launcher":
            run.kill_all()
        case "stopped":
            run.stop_and_resume()
        case "branch":  # from a checkpoint, while the episodes of the branch before are in flight
            run.kill_all("--fresh", "--at-step", str(rng.choice(run.checkpoint_steps()[-2:])))
        case "fork":  # another run, whose ledger has the episodes in flight as the checkpoint has them
            run.fork("--at-step", str(rng.choice(run.checkpoint_steps()[-2:])))


def went_on(fork: RunFolder, source: RunFolder) -> int:
    """How many turns that `source` recorded are part of trajectories that `fork` played to their end."""
    ledger, before = read_ledger(fork.buffer), read_ledger(source.buffer)
    of = itemgetter("grp", "idx", "attempt", "number", "form", "tokens")
    recorded = {of(row) for row in before.tables["turns"]}
    own = {place for place, row in ledger.trajectories.items() if row.branch not in before.branches}
    continued = [row for row in ledger.tables["turns"] if row["ended"] == "continued" and of(row) in recorded]
    return sum((row["grp"], row["idx"]) in own for row in continued)


@pytest.mark.slow
@pytest.mark.timeout(14400)
@pytest.mark.parametrize("env", ["WithSnapshots", "Again", "agent"])
def test_kills_at_random_turns_lose_none(long_run: Any, env: str) -> None:
    """`ASYNCRL_TEST_KILLS` (200) of actors, their hosts, the buffer and all processes at once, which are resumed, or
    begin a new branch; `ASYNCRL_TEST_SEED` draws others."""
    kills = int(os.environ.get("ASYNCRL_TEST_KILLS", "200"))
    rng = random.Random(f"{env} {os.environ.get('ASYNCRL_TEST_SEED', '0')}")
    workers = {} if env == "agent" else {"workers": "processes", "worker_count": 1}
    run = long_run(env, "on", steps=100_000, actors={"count": 2, "slots": 2}, env=workers)
    seen, ways, began = 0, drawn(rng, kills), time.monotonic()
    for number, way in enumerate(ways):
        enough = seen + rng.randrange(8, 40)  # somewhere else in the episodes each time
        assert until(lambda enough=enough: len(run.steps()) >= enough, START_S), f"kill {number} {way}\n{run.out}"
        there = lambda: all(run.pid(role) for role in ("buffer", "actor-0", "actor-1"))  # noqa: E731
        assert until(there, START_S), run.out
        if way in ("branch", "fork"):
            assert until(lambda: bool(run.checkpoint_steps()), START_S), run.out
        time.sleep(rng.uniform(0.0, 0.1))
        seen = len(run.steps())
        interrupt(run, way, rng)
    enough = seen + 8 * TURNS
    assert until(lambda: len(run.steps()) >= enough, START_S), run.out
    run.end()
    played = [*run.left, run.played()]
    for each in played:
        as_undisturbed(each, agent=env == "agent")
    carried = [went_on(fork.run, source.run) for source, fork in pairwise(played)]
    print(
        f"{env}: {kills} kills ({dict(Counter(ways))}) in {time.monotonic() - began:.0f} s; "
        f"{carried} turns went on in forks"
    )
    assert any(carried) or not carried


def as_undisturbed(played: Played, *, agent: bool) -> None:
    """No token was sampled twice or lost, no action was repeated in a history, and the audit finds nothing."""
    run, steps = played
    trajectories = exact(run, agent=agent)
    samples = none_was_sampled_twice(run, steps, "summary" if agent else "sample")
    ledger = read_ledger(run.buffer)
    ended = Counter(row["ended"] or "kept" for row in ledger.tables["turns"])
    print(
        f"{run.path.name}: {len(trajectories)} trajectories, {samples} samples; {carried_out_again(steps)} actions "
        f"carried out again in abandoned copies; {dict(ended)}"
    )
    assert not ended.keys() & {"failed", "diverged", "lost", "stale", "anew"}
    with closing(PayloadFiles(run.buffer / "payloads")) as files:
        found = figures(gather(run, run.load_config(), files))
    assert not any(found.lost.values())
    assert not found.lost_turns, "the ledger has all that was acknowledged"
    reasons = {group.reason for group in ledger.groups.values()} - {None}
    assert reasons <= {"discarded_branch"}, "nothing but a new branch drops a group"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_lost_host_of_the_buffer_costs_the_turns_since_the_checkpoint(long_run: Any) -> None:
    """Episodes that were in flight then go on, on a new branch, with the turns that the checkpoint has."""
    run = long_run("WithSnapshots", "on", steps=100_000, learner={"checkpoint_every": 3})
    assert until(lambda: len(list(run.run.checkpoints.glob("step-*"))) >= 2, START_S), run.out
    seen = len(run.steps())
    assert until(lambda: len(run.steps()) >= seen + 3 * TURNS, START_S), run.out
    os.kill(run.pid("buffer"), signal.SIGKILL)
    shutil.rmtree(run.run.buffer)
    assert until(lambda: bool(list(run.run.checkpoints.glob("step-*-br1"))), 2 * START_S), run.out
    run.end()
    exact(run.run)
    ledger = read_ledger(run.run.buffer)
    lent = {(a.group, a.index, a.attempt): a.branch for attempts in ledger.attempts.values() for a in attempts}
    continued = [row for row in ledger.tables["turns"] if row["ended"] == "continued"]
    before = [row for row in continued if lent[row["grp"], row["idx"], row["attempt"]] == 0]
    went_on = [row for row in before if ledger.trajectories[row["grp"], row["idx"]].branch == 1]
    assert went_on, "turns of the branch before are in trajectories of this one"
    with closing(PayloadFiles(run.run.buffer / "payloads")) as files:
        evidence = gather(run.run, run.run.load_config(), files)
    lost = figures(evidence).lost_turns
    assert lost, "turns since the checkpoint, of which the actor was told that they are stored"
    held = {
        (lent[place], *place, row["number"], row["form"], row["tokens"])
        for row in ledger.tables["turns"]
        if (place := (row["grp"], row["idx"], row["attempt"]))
    }
    told = [line for log in evidence.acks for line in log.turns]
    place_of = attrgetter("branch", "group", "index", "attempt", "number", "form", "tokens")
    missing = [str(line) for line in told if place_of(line) not in held]
    assert sorted(missing) == sorted(lost), "each of them, and no other"
    print(f"{len(went_on)} recorded turns went on, {len(lost)} were lost with the host")
