"""A version that is kept for an evaluation while newer ones are published."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asyncrl.weights.local.shm import ShmPublisher, ShmSubscriber
from asyncrl.weights.protocol import WeightsCorrupt


def publish(publisher: ShmPublisher, version: int) -> None:
    publisher.publish(0, version, [("w", torch.full((1000,), float(version)))])


def value(subscriber: ShmSubscriber, version: tuple[int, int] | None = None) -> float:
    opened = subscriber.open(version=version)
    try:
        return next(float(tensor[0]) for _, tensor in opened.tensors())
    finally:
        opened.close()


def test_a_pinned_version_outlives_newer_ones_and_the_publisher(tmp_path: Path) -> None:
    publisher, reader = ShmPublisher(tmp_path), ShmSubscriber(tmp_path)
    publish(publisher, 0)
    publish(publisher, 1)
    assert publisher.pin((0, 1))
    for version in range(2, 8):  # their files are reused, that of the pinned version is not
        publish(publisher, version)
        assert (value(reader), value(reader, (0, 1))) == (version, 1.0)
    assert not publisher.pin((0, 2)), "it is gone"
    assert reader.pinned() is not None
    again, late = ShmPublisher(tmp_path), ShmSubscriber(tmp_path)
    assert again.pin((0, 1)), "by the one before"
    publish(again, 8)
    assert (value(late), value(late, (0, 1)), value(late, (0, 8))) == (8.0, 1.0, 8.0)
    assert len(list(tmp_path.glob("*.weights"))) <= 2
    again.unpin()
    assert late.pinned() is None
    assert not list(tmp_path.glob("*.pinned"))
    with pytest.raises(WeightsCorrupt, match="no weights can be opened"):
        late.open(version=(0, 1))


def test_another_pin_replaces_the_one_before_and_what_a_crash_left_is_removed(tmp_path: Path) -> None:
    publisher, reader = ShmPublisher(tmp_path), ShmSubscriber(tmp_path)
    for version in (0, 1):
        publish(publisher, version)
        assert publisher.pin((0, version))
    assert [path.name for path in tmp_path.glob("*.pinned")] == ["000000-0000000001.pinned"]
    (tmp_path / "000000-0000000000.pinned").write_bytes(b"")  # of a crash between the link and the pointer
    ShmPublisher(tmp_path)
    assert [path.name for path in tmp_path.glob("*.pinned")] == ["000000-0000000001.pinned"]
    assert value(reader, (0, 1)) == 1.0
