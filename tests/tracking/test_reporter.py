import doctest
import time

import msgpack
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.tracking import reporter as module
from asyncrl.tracking.reporter import Reporter, WaitClock


@pytest.fixture
def pull(tmp_path):
    address = f"ipc://{tmp_path}/l.sock"
    socket = zmq.Context.instance().socket(zmq.PULL)
    socket.bind(address)

    def receive(n):
        found = []
        deadline = time.monotonic() + 60
        while len(found) < n:
            assert time.monotonic() < deadline, f"{len(found)} of {n} messages came"
            if socket.poll(200):
                found.append(msgpack.unpackb(socket.recv()))
        return found

    receive.address = address
    yield receive
    socket.close(0)


def test_what_is_reported_arrives_in_order(pull):
    reporter = Reporter(pull.address, "learner")
    reporter.ready()
    reporter.metrics({"reward/mean": 0.5}, step=3)
    reporter.waiting("batch", on="buffer")
    reporter.event("published", version=3)
    reporter.close()
    ready, metrics, waiting, event = pull(4)
    assert (ready["kind"], ready["role"]) == ("ready", "learner")
    assert (metrics["values"], metrics["step"]) == ({"reward/mean": 0.5}, 3)
    assert (waiting["cause"], waiting["on"]) == ("batch", "buffer")
    assert (event["event"], event["fields"]) == ("published", {"version": 3})


def test_an_unknown_series_is_left_out_and_counted_or_raises_when_strict(pull):
    reporter = Reporter(pull.address, "actor-0")
    reporter.metrics({"reward/mean": 1, "reward/meen": 2})
    (message,) = pull(1)
    assert message["values"] == {"reward/mean": 1.0}
    assert reporter.unknown == 1
    reporter.close()
    strict = Reporter(pull.address, "actor-0", strict=True)
    with pytest.raises(ValueError, match="reward/meen"):
        strict.metrics({"reward/meen": 2})
    strict.close()


def test_nobody_listening_never_blocks_and_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "HIGH_WATER", 5)
    reporter = Reporter(f"ipc://{tmp_path}/nobody.sock", "actor-0")
    begun = time.monotonic()
    for _ in range(50):
        reporter.metrics({"reward/mean": 1.0})
    reporter.close()
    reporter.event("after close")
    assert time.monotonic() - begun < 30.0
    assert reporter.lost >= 45


def test_waiting_for_the_same_thing_again_is_not_sent_again(pull):
    reporter = Reporter(pull.address, "actor-0")
    for _ in range(10):
        reporter.waiting("ticket")
    reporter.waiting(None)
    first, second = pull(2)
    assert first["cause"] == "ticket"
    assert second["cause"] is None
    assert set(second["waits"]) == {"ticket"}
    reporter.close()


@given(st.lists(st.tuples(st.sampled_from([None, "a", "b"]), st.floats(0, 100)), max_size=30), st.floats(0, 100))
def test_waiting_and_working_add_up_to_the_time_that_passed(changes, tail):
    clock, now, worked = WaitClock(0.0), 0.0, 0.0
    cause = None
    for next_cause, dt in changes:
        now += dt
        worked += dt if cause is None else 0.0
        clock.wait(next_cause, now)
        cause = next_cause
    now += tail
    worked += tail if cause is None else 0.0
    assert sum(clock.seconds(now).values()) + worked == pytest.approx(now)


def test_a_change_of_the_peer_goes_on_with_the_same_wait():
    clock = WaitClock(0.0)
    clock.wait("batch", 1.0, on="buffer")
    assert clock.wait("batch", 2.0, on="4 groups in flight")
    assert clock.since == 1.0
    assert clock.seconds(3.0) == {"batch": 2.0}


def test_docstrings():
    assert doctest.testmod(module).failed == 0
