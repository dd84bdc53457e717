"""A version that an evaluation is pinned to, on its way to other hosts while newer ones are published."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asyncrl.sockets import Endpoint
from asyncrl.weights.local.shm import ShmPublisher, ShmSubscriber
from asyncrl.weights.network.mirror import Mirror
from asyncrl.weights.network.subscriber import MirroredSubscriber
from asyncrl.weights.protocol import WeightsVersion
from tests.weights.network.mirror_stage import Place, holds, model, until


def keeps(mirror: Mirror, id: WeightsVersion | None) -> bool:
    return until(lambda: ShmSubscriber(mirror.dir).pinned() == id)


def pinned(mirror: Mirror, id: WeightsVersion) -> bool:
    """Whether its bytes are those that were published."""
    opened = ShmSubscriber(mirror.dir).open(version=id.order)
    try:
        sent = model(id.version)
        return opened.id == id and all(torch.equal(tensor, sent[name]) for name, tensor in opened.tensors())
    finally:
        opened.close()


def damage(file: Path, data: bytes) -> None:
    """In its place: the server has it mapped, and a map of a file that is cut ends the process."""
    with file.open("r+b") as opened:
        opened.seek(1000)
        opened.write(data)


@pytest.mark.parametrize("relays", [False, True])
def test_every_host_keeps_the_pinned_version_and_a_late_one_fetches_it(place: Place, relays: bool) -> None:
    place.serve(fanout=1 if relays else 0)
    hosts = [place.host(f"host-{i}", relays=relays, join_s=0.2) for i in range(2)]
    first = place.publish(0)
    assert all(holds(host, first) for host in hosts)
    assert place.publisher.pin((0, 0))
    assert all(keeps(host, first) for host in hosts)
    for version in range(1, 6):
        newest = place.publish(version)
        assert all(holds(host, newest) and pinned(host, first) for host in hosts)
    late = place.host("late", relays=relays, join_s=0.2)
    assert keeps(late, first)
    assert pinned(late, first)
    assert holds(late, newest)
    assert place.publisher.pin((0, 5)), "the next evaluation"
    assert all(keeps(host, newest) and pinned(host, newest) for host in (*hosts, late))
    if not relays:
        assert [host.counts["pinned"] for host in (*hosts, late)] == [0, 0, 1], "those that held it fetched nothing"
    place.publisher.unpin()
    assert all(keeps(host, None) for host in (*hosts, late))
    assert until(lambda: not [file for host in (*hosts, late) for file in host.dir.glob("*.pinned")])


def test_a_host_that_missed_the_pinned_version_fetches_it_whole(place: Place) -> None:
    host = place.host()
    first = place.publish(0)
    assert place.publisher.pin((0, 0))
    newest = [place.publish(version) for version in (1, 2, 3)][-1]
    serving = place.serve()
    assert holds(host, newest)
    assert keeps(host, first)
    assert pinned(host, first)
    again = ShmPublisher(place.path / "source")
    assert again.pin((0, 0)), "by the learner's next process"
    last = again.publish(0, 4, model(4).items())
    assert holds(host, last)
    assert pinned(host, first)
    assert serving.server.counts["refused"] == 0


def test_a_damaged_pinned_version_is_not_kept_and_the_newest_is_still_followed(place: Place) -> None:
    serving = place.serve()
    first = place.publish(0)
    assert place.publisher.pin((0, 0))
    place.publish(1)
    place.publish(2)
    (file,) = (place.path / "source").glob("*.pinned")
    whole = file.read_bytes()
    damage(file, bytes(8))
    host = place.host()
    assert until(lambda: host.counts["corrupt"] > 0)
    assert holds(host, place.publish(3))
    assert ShmSubscriber(host.dir).pinned() is None
    damage(file, whole[1000:1008])
    assert keeps(host, first)
    assert serving.server.latest is not None


def test_an_actor_opens_it_as_over_shared_memory(place: Place) -> None:
    place.serve()
    first = place.publish(0)
    assert place.publisher.pin((0, 0))
    newest = place.publish(1)
    (place.path / "actor").mkdir(mode=0o700)
    reader = MirroredSubscriber(place.path / "actor" / "mirror", Endpoint.of(place.address))
    try:
        assert until(lambda: (reader.latest(), reader.pinned()) == (newest, first))
        opened = reader.open(version=(0, 0))
        assert opened.id == first
        opened.close()
    finally:
        reader.close()
