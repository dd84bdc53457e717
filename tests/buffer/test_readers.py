from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from asyncrl.buffer.client import BufferRefused, pages
from asyncrl.buffer.in_process import InProcessBuffer
from asyncrl.buffer.ledger.pages import Pages
from asyncrl.buffer.requests import readers
from asyncrl.buffer.requests.readers import Rate
from tests.buffer.fakes import FakeSource, rules, trajectory


@pytest.fixture
def buffer(tmp_path: Path) -> InProcessBuffer:
    made = InProcessBuffer(rules(), FakeSource(), folder=tmp_path)
    incarnation = made.start(0, 0, None).incarnation
    made.published(incarnation, 0, 0, "digest-0")
    for ticket in made.tickets("in-process", (0, 0), 4, [], 0.0).tickets:
        t = trajectory(ticket)
        assert made.put(type(t)(**{n: getattr(t, n) for n in t.__slots__} | {"actor": "in-process"})) == "stored"
    return made


def test_a_reader_gets_rows_and_trajectories(buffer: InProcessBuffer) -> None:
    page = buffer.page(0, 0)
    assert [(t.group, t.index) for t in page.trajectories] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for entry in page.trajectories:
        read = buffer.record(entry.group, entry.index)
        assert read is not None
        assert read.digest() == entry.digest
    assert buffer.record(7, 0) is None
    assert buffer.page(2, 99).groups == []
    buffer.close()


def test_past_the_rate_readers_are_refused_until_later(buffer: InProcessBuffer) -> None:
    for _ in range(pages.PER_S):
        buffer.page(0, 0)
    with pytest.raises(BufferRefused) as refused:
        buffer.record(0, 0)
    assert refused.value.code == "busy"
    assert buffer.status()["branch"] == 0, "whoever plays or trains is not concerned"
    buffer.clock.advance(1.0)
    assert buffer.record(0, 0) is not None
    buffer.close()


def test_what_readers_are_given_is_bounded_in_bytes_too(
    buffer: InProcessBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ledger,) = tmp_path.rglob("ledger.sqlite")
    with closing(Pages(ledger)) as rows:
        location = rows.location(0, 0)
    assert location is not None
    monkeypatch.setattr(readers, "BYTES", location.bytes / 10)  # each record costs as much as eleven requests
    assert buffer.record(0, 0) is not None
    assert buffer.record(0, 0) is not None, "the first ones of a bucket of 20 are answered: it may go into debt"
    with pytest.raises(BufferRefused) as refused:
        buffer.page(0, 0)
    assert refused.value.code == "busy"
    buffer.clock.advance(0.05)  # one more request of a bucket that owes two
    with pytest.raises(BufferRefused):
        buffer.page(0, 0)
    buffer.clock.advance(0.15)
    assert buffer.page(0, 0).groups
    buffer.close()


def test_a_trajectory_that_is_too_large_is_refused(buffer: InProcessBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MOST_BYTES", 10)
    with pytest.raises(BufferRefused, match="readers get at most 10: view it when the run is over") as refused:
        buffer.record(0, 0)
    assert refused.value.code == "too_large"
    buffer.close()


def test_a_clock_that_is_set_back_refuses_nobody_for_long() -> None:
    rate = Rate(2, now=100.0)
    assert [rate.allows(t) for t in (100.0, 50.0, 50.0, 51.0)] == [True, True, False, True]
