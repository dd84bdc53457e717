from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from asyncrl.actors.episodes.progress import Progress
from asyncrl.actors.leases import LeaseKeeper, Patience
from asyncrl.errors import RunError
from asyncrl.trajectory import Lease, TicketId

A, B = (TicketId(0, 0, 0), 1), (TicketId(0, 0, 1), 2)


@pytest.mark.parametrize(
    ("phase", "now", "engine_moved", "why"),
    [
        ("environment", 11.0, 11.0, ""),
        ("environment", 21.0, 21.0, "no progress for 11 s in phase environment"),
        ("generate", 21.0, 20.0, ""),
        ("generate", 31.0, 20.0, "no progress for 11 s in phase generate"),
        ("generate", 111.0, 111.0, "it has lasted 101 s (actors.episode_s is 100)"),
        ("put", 999.0, 0.0, ""),
    ],
)
def test_patience(phase: str, now: float, engine_moved: float, why: str) -> None:
    found = Patience(10.0, 100.0).exhausted(now, Progress(10.0, phase), engine_moved)
    assert found.startswith(why)
    assert bool(found) == bool(why)


@pytest.mark.parametrize(
    ("now", "turn_at", "why"),
    [
        (111.0, 60.0, ""),
        (170.0, 60.0, "it has finished no turn for 110 s (actors.episode_s is 100)"),
        (305.0, 300.0, ""),
        (311.0, 310.0, "it has lasted 301 s (actors.episode_max_s is 300)"),
    ],
)
def test_each_finished_turn_extends_an_episode_up_to_its_hard_limit(now: float, turn_at: float, why: str) -> None:
    progress = Progress(10.0, clock=lambda: turn_at)
    progress.sampled(5)
    progress.at = now
    assert Patience(1000.0, 100.0, 300.0).exhausted(now, progress, now) == why


def test_the_time_of_a_finished_turn_does_not_count_against_the_next() -> None:
    now = 0.0
    progress = Progress(0.0, clock=lambda: now)
    progress.enter("generate")
    now = 350.0
    progress.sampled(10)  # as in the endpoint, whose phase changes when all choices of the request are there
    progress.enter("environment")
    now = 360.0
    progress.enter("generate")
    now = 610.0
    assert Patience(1e9, 600.0, 6000.0).exhausted(now, progress, now) == ""
    now = 951.0
    assert Patience(1e9, 600.0, 6000.0).exhausted(now, progress, now).startswith("it has finished no turn for 601 s")


def keeper_of(renewed: list[list[Lease]], revoked: Sequence[Lease] = (), **options: float) -> LeaseKeeper:
    def renew(leases: Sequence[Lease]) -> list[Lease]:
        renewed.append(list(leases))
        return [lease for lease in leases if lease in revoked]

    return LeaseKeeper(renew, lambda: 0.0, Patience(10.0, 100.0), options.get("every_s", 0.01))


def test_only_episodes_that_get_on_are_renewed() -> None:
    renewed: list[list[Lease]] = []
    given_up: list[tuple[str, str]] = []
    keeper = keeper_of(renewed)
    alive = Progress(0.0)
    keeper.hold(A, alive, lambda *why: given_up.append(why))
    keeper.hold(B, Progress(0.0), lambda *why: given_up.append(why))
    keeper.look(5.0)
    alive.at = 9.0
    keeper.look(12.0)
    assert renewed == [[A, B], [A]]
    ((reason, detail),) = given_up
    assert reason == "timeout"
    assert "0.0.1" in detail
    assert keeper.leased() == [A]


def test_a_revoked_lease_is_given_up_once() -> None:
    renewed: list[list[Lease]] = []
    given_up: list[str] = []
    keeper = keeper_of(renewed, revoked=[A])
    keeper.hold(A, Progress(0.0), lambda reason, _: given_up.append(reason))
    keeper.hold(B, Progress(0.0), lambda reason, _: given_up.append(reason))
    keeper.look(1.0)
    keeper.look(2.0)
    assert given_up == ["revoked"]
    assert renewed == [[A, B], [B]]


def test_a_silent_buffer_revokes_nothing() -> None:
    def renew(leases: Sequence[Lease]) -> list[Lease]:
        raise RunError("no answer")

    keeper = LeaseKeeper(renew, lambda: 0.0, Patience(10.0, 100.0), 1.0)
    keeper.hold(A, Progress(0.0), lambda *_: pytest.fail("given up"))
    keeper.look(1.0)
    assert keeper.leased() == [A]
    assert keeper.failed_rounds == 1


def test_the_thread_outlives_a_round_that_fails() -> None:
    rounds = 0
    enough = threading.Event()

    def renew(leases: Sequence[Lease]) -> list[Lease]:
        nonlocal rounds
        rounds += 1
        if rounds == 1:
            raise ValueError("an answer that is none")
        enough.set()
        return []

    keeper = LeaseKeeper(renew, lambda: 0.0, Patience(10.0, 100.0), 0.01)
    keeper.hold(A, Progress(time.monotonic()), lambda *_: None)
    keeper.start()
    assert enough.wait(60.0)
    keeper.close()
    assert keeper.failed_rounds == 1


def test_the_thread_renews_while_the_event_loop_is_busy() -> None:
    renewed: list[list[Lease]] = []
    enough = threading.Event()

    def renew(leases: Sequence[Lease]) -> list[Lease]:
        renewed.append(list(leases))
        if len(renewed) >= 3:
            enough.set()
        return []

    keeper = LeaseKeeper(renew, lambda: 0.0, Patience(10.0, 100.0), 0.01)
    keeper.hold(A, Progress(time.monotonic()), lambda *_: None)
    keeper.start()
    assert enough.wait(60.0)
    keeper.close()
    assert not keeper._thread.is_alive()
