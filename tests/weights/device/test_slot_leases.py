"""What the learner lends: checksums and layout of a copy, and who may read which, without sockets."""

from __future__ import annotations

import doctest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import RunError
from asyncrl.weights.device import slot_leases
from asyncrl.weights.device.checksum import as_hex, checksum
from asyncrl.weights.device.slot_leases import SlotLease, SlotLeases
from asyncrl.weights.device.snapshot import DeviceSnapshot, all_views
from asyncrl.weights.local.file import ALIGN
from asyncrl.weights.protocol import WeightsVersion
from tests.weights.device.device_model import alike, model

CPU = torch.device("cpu")


@settings(deadline=None)
@given(st.binary(max_size=70), st.data())
def test_a_checksum_tells_what_changed(data: bytes, draw: st.DataObject) -> None:
    def sum_of(raw: bytes) -> str:
        return as_hex(
            [checksum(torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0).byte())]
        )[0]

    changed = bytearray(data)
    if data:
        at = draw.draw(st.integers(0, len(data) - 1))
        changed[at] ^= 1 << draw.draw(st.integers(0, 7))
        assert sum_of(bytes(changed)) != sum_of(data)
    words = [data[i : i + 4] for i in range(0, len(data) - 3, 4)]
    swapped = b"".join(reversed(words))
    assert (sum_of(swapped) == sum_of(b"".join(words))) == (swapped == b"".join(words))


def test_a_checksum_does_not_depend_on_how_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randint(0, 255, (10_003,), dtype=torch.uint8)
    before = as_hex([checksum(data)])
    monkeypatch.setattr("asyncrl.weights.device.checksum.BLOCK", 100)
    assert as_hex([checksum(data)]) == before


def test_a_snapshot_is_a_copy_that_keeps_its_memory() -> None:
    snapshot = DeviceSnapshot(CPU, chunk_bytes=4096)
    first = model(0)
    a = snapshot.fill(0, first.items())
    memory = [chunk.data_ptr() for chunk in snapshot.chunks]
    assert len(memory) > 2, "a large tensor has a chunk of its own"
    assert alike(dict(all_views(snapshot.layout, snapshot.chunks)), first)
    first["large"].zero_()
    assert not alike(dict(all_views(snapshot.layout, snapshot.chunks)), first)
    b = snapshot.fill(1, model(1).items())
    assert [chunk.data_ptr() for chunk in snapshot.chunks] == memory
    assert alike(dict(all_views(snapshot.layout, snapshot.chunks)), model(1))
    assert a != b
    assert a == DeviceSnapshot(CPU, chunk_bytes=100).fill(7, model(0).items()), "whatever the chunks"
    snapshot.fill(2, [("w", torch.ones(3))])
    assert len(snapshot.chunks) == 1


def test_of_a_chunk_only_what_is_filled_is_sent() -> None:
    snapshot = DeviceSnapshot(CPU, chunk_bytes=4096)
    tensors = {"a": torch.ones(700), "b": torch.ones(700), "none": torch.empty(0), "c": torch.ones(3)}
    snapshot.fill(0, tensors.items())
    sent = snapshot.filled()
    assert [len(chunk) for chunk in snapshot.chunks] == [4096, 4096]
    assert tuple(map(len, sent)) == snapshot.layout.sizes
    assert sum(map(len, sent)) < 2 * 2800 + 12 + 3 * ALIGN, "not the free rest of a chunk"
    assert all(part.data_ptr() == chunk.data_ptr() for part, chunk in zip(sent, snapshot.chunks, strict=True))
    received = [part.clone() for part in sent]
    assert alike(dict(all_views(snapshot.layout, received)), tensors)


def test_weights_that_are_not_finite_or_of_no_known_type_are_not_published() -> None:
    with pytest.raises(RunError, match="version 3 are not published: b holds"):
        DeviceSnapshot(CPU).fill(3, [("a", torch.ones(2)), ("b", torch.tensor([1.0, float("nan")]))])
    with pytest.raises(ValueError, match="complex64"):
        DeviceSnapshot(CPU).fill(3, [("a", torch.ones(2, dtype=torch.complex64))])


# Loans.


def test_the_example() -> None:
    assert doctest.testmod(slot_leases).failed == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["publish", "lease", "release", "wait"]), st.integers(0, 2)), max_size=60))
def test_what_is_lent_stays_or_its_reader_is_told(steps: list[tuple[str, int]]) -> None:
    """The model: what each reader sees in its slot, and what it was when it was lent."""
    leases, now, version = SlotLeases(2, lease_s=10.0), 0.0, 0
    held: dict[int, int] = {}
    seen: dict[int, tuple[int, int, float]] = {}
    for what, who in steps:
        name = f"actor-{who}"
        if what == "publish":
            slot = leases.begin(now)
            if slot is None:
                assert any(until > now for _, _, until in seen.values())
                continue
            for reader, (theirs, _, until) in seen.items():
                assert theirs != slot or until <= now, f"{reader} reads it"
            version += 1
            held[slot] = version
            leases.commit(slot)
        elif what == "lease":
            lease = leases.lease(name, now)
            assert (lease is None) == (not held)
            if lease is not None:
                assert held[lease.slot] == version, "the newest"
                seen[who] = lease.slot, version, lease.until
        elif what == "release" and who in seen:
            slot, was, _ = seen.pop(who)
            assert leases.release(name) == (held[slot] == was)
        else:
            now += 4.0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["publish", "lease", "release", "wait"]), st.integers(0, 2)), max_size=60))
def test_a_single_slot_is_written_when_nobody_reads_it(steps: list[tuple[str, int]]) -> None:
    leases, now, held, waits = SlotLeases(1, lease_s=10.0), 0.0, 0, False
    seen: dict[str, tuple[int, float]] = {}
    for what, who in steps:
        name = f"actor-{who}"
        if what == "publish":
            slot = leases.begin(now)
            assert (slot is None) == any(until > now for _, until in seen.values())
            waits = slot is None
            if slot is not None:
                assert leases.lease("early", now) is None, "it is being written"
                held += 1
                leases.commit(slot)
        elif what == "lease":
            seen.pop(name, None)
            lease = leases.lease(name, now)
            assert (lease is None) == (not held or waits), "nobody new while a publication waits"
            if lease is not None:
                seen[name] = held, lease.until
        elif what == "release" and name in seen:
            assert leases.release(name) == (seen.pop(name)[0] == held)
        else:
            now += 4.0


def leased(*readers: tuple[str, float]) -> tuple[SlotLeases, list[SlotLease]]:
    """The leases of one slot, published at 0 and leased by these readers at these times, for 10 s each."""
    leases = SlotLeases(1, lease_s=10.0)
    leases.commit(leases.begin(0.0))
    given = [leases.lease(reader, now) for reader, now in readers]
    return leases, [lease for lease in given if lease is not None]


def test_a_lease_is_dropped_once() -> None:
    """A send that fails late must not end what the reader has leased since."""
    leases, (failed, again) = leased(("actor-0", 0.0), ("actor-0", 1.0))
    leases.drop("actor-0", failed)
    assert leases.begin(2.0) is None
    leases.drop("actor-0", again)
    assert leases.begin(2.0) == 0


def test_versions_are_named_as_everywhere() -> None:
    """Digests of a snapshot are those of names, types, shapes and checksums, in the order of names."""
    one, other = DeviceSnapshot(CPU), DeviceSnapshot(CPU)
    assert one.fill(0, model(0).items()) == other.fill(0, reversed(list(model(0).items())))
    assert WeightsVersion(0, 1, "").order < WeightsVersion(1, 0, "").order


def test_a_lease_is_prolonged_by_who_is_heard_and_curtailed_of_who_is_not() -> None:
    leases, (a, b) = leased(("a", 0.0), ("b", 0.0))
    leases.prolong("a", 4.0)
    for reader, lease in (("a", a), ("b", b)):
        leases.curtail(reader, lease, 6.0)
    leases.release("missing")
    assert leases.begin(7.0) is None, "a has it until 14"
    leases.release("a")
    assert leases.begin(5.9) is None
    assert leases.begin(6.0) == 0
    leases.prolong("b", 7.0)
    assert leases.of("b") is None, "what was written over does not come back"
