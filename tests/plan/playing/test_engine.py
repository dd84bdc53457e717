"""The modelled engine and shared cores, against times worked out by hand."""

from __future__ import annotations

import pytest

from asyncrl.plan.playing.clock import Clock, Cores, Task
from asyncrl.plan.playing.engine import Engine, Versions
from asyncrl.plan.times import EngineTimes


def engine(clock: Clock, times: EngineTimes, cores: Cores | None = None) -> Engine:
    return Engine(clock, cores or Cores(float("inf")), times, 1.0, 0)


def run(clock: Clock) -> None:
    while clock.next():
        pass


def test_requests_share_the_engine() -> None:
    """Alone a token takes 1.5 s, of two 2 s: 10 s for two tokens each, then 2 tokens alone."""
    clock, ends = Clock(), {}
    one = engine(clock, EngineTimes(1.0, 0.5, 0.0))
    for name, sampled in (("short", 2), ("long", 4)):
        one.request(0, sampled, lambda _, name=name: ends.setdefault(name, clock.now))
    run(clock)
    assert ends == pytest.approx({"short": 4.0, "long": 7.0}, abs=1e-4)


def test_prefill_stops_the_others() -> None:
    clock, ends = Clock(), {}
    one = engine(clock, EngineTimes(1.0, 0.0, 0.1))
    one.request(0, 4, lambda _: ends.setdefault("first", clock.now))
    clock.after(1.0, lambda: one.request(20, 2, lambda _: ends.setdefault("second", clock.now)))
    run(clock)
    assert ends == pytest.approx({"first": 6.0, "second": 5.0}, abs=1e-4)


def test_tokens_carry_the_version_that_sampled_them() -> None:
    clock, found = Clock(), []
    one = engine(clock, EngineTimes(1.0, 0.0, 0.0))

    def done(versions: Versions) -> None:
        found.append((clock.now, versions))

    one.request(0, 5, done)
    clock.after(2.5, lambda: one.load(1, pause_s=1.0))
    clock.after(4.6, lambda: one.load(2, pause_s=0.0))
    run(clock)
    assert found == [(pytest.approx(6.0, abs=1e-4), [(0, 2), (1, 1), (2, 2)])]


def test_roles_that_share_cores_slow_each_other_down() -> None:
    """Two tasks of 2 s on one core: both at half speed until the first ends, then the other at full speed."""
    clock, cores, ends = Clock(), Cores(1.0), {}
    Task(clock, cores, 1.0).begin(2.0, lambda: ends.setdefault("first", clock.now))
    clock.after(1.0, lambda: Task(clock, cores, 1.0).begin(2.0, lambda: ends.setdefault("second", clock.now)))
    run(clock)
    assert ends == pytest.approx({"first": 3.0, "second": 4.0})


def test_an_engine_and_the_learner_share_a_core() -> None:
    clock, cores, ends = Clock(), Cores(1.0), {}
    one = engine(clock, EngineTimes(1.0, 0.0, 0.0), cores)
    one.request(0, 3, lambda _: ends.setdefault("turn", clock.now))
    Task(clock, cores, 1.0).begin(1.0, lambda: ends.setdefault("step", clock.now))
    run(clock)
    assert ends == pytest.approx({"step": 2.0, "turn": 4.0}, abs=1e-4)
