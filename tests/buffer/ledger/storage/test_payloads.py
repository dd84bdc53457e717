from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.buffer.ledger.storage.database import Database
from asyncrl.buffer.ledger.storage.payloads import Location, PayloadLost, Payloads
from asyncrl.buffer.record import from_record, split, to_record
from asyncrl.trajectory import TicketId
from asyncrl.wire import WireError
from tests.buffer.fakes import trajectory


def test_what_is_appended_is_read_before_and_after_it_is_written(tmp_path: Path) -> None:
    payloads = Payloads(tmp_path)
    where = [payloads.append(bytes([n]) * (n + 1)) for n in range(3)]
    assert payloads.read(where[1]) == b"\1\1"
    payloads.write(flush=True)
    more = payloads.append(b"more")
    assert [payloads.read(w) for w in [*where, more]] == [b"\0", b"\1\1", b"\2\2\2", b"more"]
    assert payloads.disk_bytes == 6
    payloads.close()
    again = Payloads(tmp_path)
    assert again.read(where[2]) == b"\2\2\2"
    assert again.current != where[2].segment
    with pytest.raises(PayloadLost):
        again.read(more)  # it was never written
    again.close()


def test_segments_rotate_and_are_removed(tmp_path: Path) -> None:
    payloads = Payloads(tmp_path, segment_bytes=10)
    where = []
    for n in range(4):
        where.append(payloads.append(bytes([n]) * 6))
        payloads.write(flush=False)
        payloads.rotate_if_full()
    assert sorted({w.segment for w in where}) == [0, 1]
    assert payloads.current == 2
    payloads.remove(0)
    assert payloads.segments == {1, 2}
    with pytest.raises(PayloadLost):
        payloads.read(where[0])
    assert payloads.read(where[2]) == b"\2" * 6
    with pytest.raises(ValueError, match="being written"):
        payloads.remove(2)
    payloads.close()


def test_few_of_many_segments_are_open(tmp_path: Path) -> None:
    payloads = Payloads(tmp_path, segment_bytes=1)
    where = []
    for n in range(100):
        where.append(payloads.append(bytes([n])))
        payloads.write(flush=False)
        payloads.rotate_if_full()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        assert b"".join(bytes(payloads.read(w)) for w in where) == bytes(range(100))
        assert len(os.listdir("/proc/self/fd")) - before <= 64
    for segment in range(100):
        payloads.remove(segment)
    assert len(os.listdir("/proc/self/fd")) <= before
    payloads.close()


def test_a_segment_that_ends_and_the_name_of_the_next_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: flushed.append(os.fstat(fd).st_ino))
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(os.fstat(fd).st_ino))
    payloads = Payloads(tmp_path)
    folder = tmp_path.stat().st_ino
    assert flushed == [folder]
    payloads.append(b"x")
    payloads.write(flush=False)
    assert flushed == [folder]
    payloads.seal()
    assert flushed == [folder, payloads.path(0).stat().st_ino, folder]
    payloads.close()


def test_what_a_killed_process_has_not_flushed_is_flushed_before_anything_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("off", "interval"):
        Database(tmp_path / name, "off").close()
        (tmp_path / name / "payloads" / "00000000.segment").write_bytes(b"x")  # by a process that was killed
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(os.fstat(fd).st_ino))
    left = {name: (tmp_path / name / "payloads" / "00000000.segment").stat().st_ino for name in ("off", "interval")}
    for name in ("off", "interval"):
        Database(tmp_path / name, name).close()
    assert left["interval"] in flushed
    assert left["off"] not in flushed


def test_at_most_two_segments_wait_for_the_disk_and_a_flush_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    flushed: list[str] = []

    def slow(fd: int) -> None:
        assert go.wait(20)
        flushed.append(os.readlink(f"/proc/self/fd/{fd}")[-9:])

    monkeypatch.setattr(os, "fdatasync", slow)
    payloads = Payloads(tmp_path, segment_bytes=1)
    for _ in range(2):
        payloads.append(b"x")
        payloads.write(flush=False)
        if payloads.current == 0:
            payloads.rotate_if_full()
    assert (payloads.current, flushed) == (1, [])  # the first one is full, and nobody waited for the disk
    third = threading.Thread(target=payloads.rotate_if_full)
    third.start()
    third.join(0.2)
    assert third.is_alive()
    go.set()
    third.join(20)
    assert payloads.current == 2
    payloads.append(b"y")
    payloads.write(flush=True)
    assert flushed == ["0.segment", "1.segment", "2.segment"]
    payloads.close()


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_damage_is_noticed(tmp_path: Path, damage: str) -> None:
    payloads = Payloads(tmp_path)
    where = payloads.append(b"x" * 100)
    payloads.write(flush=False)
    if damage == "cut":
        os.truncate(payloads.path(0), 50)
    else:
        with payloads.path(0).open("r+b") as file:
            file.seek(10)
            file.write(b"y")
    with pytest.raises(PayloadLost, match="was cut or changed"):
        payloads.read(where)
    with pytest.raises(PayloadLost):
        payloads.read(Location(7, 0, 1, 0))
    payloads.close()


def test_more_records_than_one_system_call_takes(tmp_path: Path) -> None:
    payloads = Payloads(tmp_path)
    where = [payloads.append(n.to_bytes(4, "little")) for n in range(3000)]
    payloads.write(flush=False)
    assert [int.from_bytes(payloads.read(w), "little") for w in where] == list(range(3000))
    payloads.close()


@given(st.integers(1, 50))
def test_a_record_gives_back_its_trajectory_with_aligned_arrays(tokens: int) -> None:
    t = trajectory(TicketId(1, 2, 3), tokens=tokens, task_id="t")
    again = from_record(to_record(t))
    assert again.digest() == t.digest()
    assert (again.rewards, again.stop_reason, again.actor) == (t.rewards, t.stop_reason, t.actor)
    row = again.rows[0]
    assert all(a.flags.aligned for a in (row.token_ids, row.mask, row.logprobs, row.versions))
    assert np.array_equal(row.logprobs, t.rows[0].logprobs)


@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 255))
def test_garbage_is_refused_and_nothing_else(garbage: bytes, place: int, value: int) -> None:
    for bad in (garbage, to_record(trajectory(TicketId(0, 0, 0)))[:place]):
        with contextlib.suppress(WireError):
            split(bad)
            from_record(bad)
    changed = bytearray(to_record(trajectory(TicketId(0, 0, 0))))
    changed[place % len(changed)] = value
    with contextlib.suppress(WireError):
        from_record(bytes(changed))
