"""The plan of an orderly stop, at every moment of it, without a process."""

from __future__ import annotations

import pytest

from asyncrl.launch.supervision.shutdown import KILL_S, GiveUp, Kill, Running, Shutdown, Stop

ACTORS = [Running("actor-0", "actor"), Running("actor-1", "actor")]
LEARNER, RANK = Running("learner", "learner"), Running("learner-1", "learner")
BUFFER, WEIGHTS = Running("buffer", "buffer"), Running("weights", "weights")


@pytest.fixture
def shutdown() -> Shutdown:
    return Shutdown(stop_s=20.0, drain_s=5.0)


def test_each_kind_is_stopped_once_the_former_has_ended(shutdown: Shutdown) -> None:
    running = [BUFFER, WEIGHTS, LEARNER, RANK, *ACTORS]
    for now, kind in enumerate((ACTORS, [LEARNER, RANK], [BUFFER], [WEIGHTS])):
        assert shutdown.plan(now, running, 0) == [Stop(process.name) for process in kind]
        assert shutdown.plan(now, running, 0) == [], "asked once"
        running = [process for process in running if process not in kind]
    assert shutdown.plan(4.0, running, 0) == []
    assert shutdown.finished(running)


def test_only_actors_have_time_to_drain(shutdown: Shutdown) -> None:
    assert shutdown.plan(0.0, ACTORS, 0) == [Stop("actor-0"), Stop("actor-1")]
    assert shutdown.plan(24.9, ACTORS, 0) == []
    assert shutdown.plan(25.1, ACTORS[1:], 0) == [Kill("actor-1", "killed: not stopped within 25 s", report=True)]
    assert shutdown.plan(30.0, [LEARNER], 0) == [Stop("learner")]
    assert shutdown.plan(50.1, [LEARNER], 0) == [Kill("learner", "killed: not stopped within 20 s", report=True)]


def test_a_second_interrupt_kills_at_once_and_is_no_event(shutdown: Shutdown) -> None:
    shutdown.plan(0.0, ACTORS, 1)
    assert shutdown.plan(0.1, ACTORS, 1) == []
    assert [(kill.name, kill.report) for kill in shutdown.plan(0.2, ACTORS, 2) if isinstance(kill, Kill)] == [
        ("actor-0", False), ("actor-1", False)
    ]  # fmt: skip


def test_a_rank_whose_leader_has_ended_is_not_waited_for(shutdown: Shutdown) -> None:
    assert shutdown.plan(0.0, [LEARNER, RANK], 0) == [Stop("learner"), Stop("learner-1")]
    orphan = Running("learner-1", "learner", leader_ended=True)
    assert shutdown.plan(0.1, [orphan], 0) == [Kill("learner-1", "its leader has ended", report=False)]


def test_what_no_kill_ends_is_given_up_and_the_rest_goes_on(shutdown: Shutdown) -> None:
    shutdown.plan(0.0, [LEARNER, BUFFER], 0)
    assert isinstance(shutdown.plan(20.1, [LEARNER, BUFFER], 0)[0], Kill)
    assert shutdown.plan(20.1 + KILL_S, [LEARNER, BUFFER], 0) == []
    assert shutdown.plan(20.2 + KILL_S, [LEARNER, BUFFER], 0) == [GiveUp("learner")]
    assert not shutdown.finished([LEARNER, BUFFER])
    assert shutdown.plan(20.3 + KILL_S, [LEARNER, BUFFER], 0) == [Stop("buffer")]
    assert shutdown.finished([LEARNER])
