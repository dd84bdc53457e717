from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from asyncrl.errors import RunError
from asyncrl.weights.local.shm import ShmPublisher, ShmSubscriber
from asyncrl.weights.protocol import WeightsCorrupt, WeightsVersion


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "layer.weight": torch.randn(7, 5, generator=g),
        "layer.half": torch.randn(3, 3, generator=g).bfloat16(),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "transposed": torch.randn(4, 6, generator=g).t(),
    }


def test_a_reader_sees_the_very_bytes(tmp_path: Path) -> None:
    sent = weights()
    id = ShmPublisher(tmp_path).publish(1, 4, sent.items())
    reader = ShmSubscriber(tmp_path)
    assert reader.latest() == id == WeightsVersion(1, 4, id.digest)
    got = reader.open()
    assert got.id == id
    received = dict(got.tensors())
    assert received.keys() == sent.keys()
    for name, tensor in sent.items():
        assert received[name].dtype == tensor.dtype
        assert received[name].shape == tensor.shape
        assert torch.equal(received[name], tensor)
        assert received[name].data_ptr() % 64 == 0 or tensor.numel() == 0
    got.close()


def test_digest_is_of_the_content_alone(tmp_path: Path) -> None:
    publisher = ShmPublisher(tmp_path)
    a = publisher.publish(0, 1, weights().items())
    b = publisher.publish(2, 9, reversed(list(weights().items())))
    c = publisher.publish(2, 10, weights(1).items())
    renamed = publisher.publish(2, 11, [(f"x.{k}", v) for k, v in weights().items()])
    assert a.digest == b.digest
    assert len({a.digest, c.digest, renamed.digest}) == 3


def test_nothing_published(tmp_path: Path) -> None:
    assert ShmSubscriber(tmp_path).latest() is None
    with pytest.raises(WeightsCorrupt, match="nothing was published"):
        ShmSubscriber(tmp_path).open()


def test_keeps_the_newest_and_readers_keep_what_they_mapped(tmp_path: Path) -> None:
    publisher, reader = ShmPublisher(tmp_path, keep=2), ShmSubscriber(tmp_path)
    publisher.publish(0, 0, weights(0).items())
    first = dict(reader.open().tensors())
    for version in range(1, 6):
        publisher.publish(0, version, weights(version).items())
    assert sorted(p.name for p in tmp_path.glob("*.weights")) == [
        "000000-0000000004.weights",
        "000000-0000000005.weights",
    ]
    assert torch.equal(first["layer.weight"], weights(0)["layer.weight"])
    publisher.publish(1, 2, weights(7).items())
    latest = reader.latest()
    assert latest is not None
    assert latest.order == (1, 2), "a newer branch wins over a higher version"


def test_writing_to_a_view_changes_nobody(tmp_path: Path) -> None:
    ShmPublisher(tmp_path).publish(0, 0, weights().items())
    reader = ShmSubscriber(tmp_path)
    mine = dict(reader.open().tensors())
    mine["layer.weight"].zero_()
    assert torch.equal(dict(ShmSubscriber(tmp_path).open().tensors())["layer.weight"], weights()["layer.weight"])
    with pytest.raises(WeightsCorrupt, match=r"layer\.weight"):
        reader.open()
    assert torch.equal(dict(reader.open().tensors())["layer.weight"], weights()["layer.weight"])


def test_a_file_is_used_again_only_when_no_reader_holds_it(tmp_path: Path) -> None:
    publisher, reader = ShmPublisher(tmp_path, keep=1), ShmSubscriber(tmp_path)
    inodes = []
    for version in range(6):
        publisher.publish(0, version, weights(version).items())
        opened = reader.open()
        inodes.append(opened.path.stat().st_ino)
        opened.close()
    assert len(set(inodes)) == 2, "written in turn"
    held = reader.open()
    seen = dict(held.tensors())
    for version in range(6, 12):
        publisher.publish(0, version, weights(version).items())
        assert torch.equal(seen["layer.weight"], weights(5)["layer.weight"])
        now = reader.open()
        assert now.path.stat().st_ino != inodes[5]
        assert torch.equal(dict(now.tensors())["layer.weight"], weights(version)["layer.weight"])
        now.close()
    held.close()
    assert len(list(tmp_path.iterdir())) <= 3, "the newest, one for the next, the pointer"


def test_a_version_of_another_size_fits_into_a_used_file(tmp_path: Path) -> None:
    publisher, reader = ShmPublisher(tmp_path, keep=1), ShmSubscriber(tmp_path)
    for n in (10, 100_000, 50, 1_000_000, 3):
        publisher.publish(0, n, [("a", torch.arange(float(n))), ("b", torch.ones(n, dtype=torch.bfloat16))])
        opened = reader.open()
        assert torch.equal(dict(opened.tensors())["a"], torch.arange(float(n)))
        opened.close()


@pytest.mark.parametrize("where", [10, 100, 200, -5, -30, -60])
def test_a_flipped_byte_is_found(tmp_path: Path, where: int) -> None:
    ShmPublisher(tmp_path).publish(0, 0, [("w", torch.arange(64.0))])
    (file,) = tmp_path.glob("*.weights")
    data = bytearray(file.read_bytes())
    data[where] ^= 1
    file.write_bytes(bytes(data))
    if where == 10:  # padding before the first tensor: no content
        ShmSubscriber(tmp_path).open()
        return
    with pytest.raises(WeightsCorrupt):
        ShmSubscriber(tmp_path).open()


@pytest.mark.parametrize("size", [0, 7, 20, 300])
def test_a_file_cut_short_is_found(tmp_path: Path, size: int) -> None:
    ShmPublisher(tmp_path).publish(0, 0, [("w", torch.arange(64.0))])
    (file,) = tmp_path.glob("*.weights")
    os.truncate(file, size)
    with pytest.raises(WeightsCorrupt):
        ShmSubscriber(tmp_path).open()


def test_a_file_of_another_version_under_the_name_is_found(tmp_path: Path) -> None:
    publisher = ShmPublisher(tmp_path)
    publisher.publish(0, 0, weights(0).items())
    publisher.publish(0, 1, weights(1).items())
    old, new = sorted(tmp_path.glob("*.weights"))
    new.write_bytes(old.read_bytes())
    with pytest.raises(WeightsCorrupt, match="another digest"):
        ShmSubscriber(tmp_path).open(verify=False)


def test_a_pointer_that_is_no_pointer(tmp_path: Path) -> None:
    (tmp_path / "latest.json").write_text("{")
    with pytest.raises(WeightsCorrupt, match="pointer"):
        ShmSubscriber(tmp_path).latest()


def test_a_failing_stream_publishes_nothing(tmp_path: Path) -> None:
    publisher = ShmPublisher(tmp_path)
    before = publisher.publish(0, 0, weights().items())
    with pytest.raises(ValueError, match="complex64"):
        publisher.publish(0, 1, [("a", torch.ones(3)), ("b", torch.ones(3, dtype=torch.complex64))])
    assert ShmSubscriber(tmp_path).latest() == before
    ShmPublisher(tmp_path)
    assert not list(tmp_path.glob("*.tmp")), "the next publisher sweeps up"


def test_full_disk_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("asyncrl.weights.local.shm._write", full)
    with pytest.raises(RunError, match="No space left"):
        ShmPublisher(tmp_path).publish(0, 0, weights().items())


def write_for_ever(folder: Path, told: Connection) -> None:
    publisher = ShmPublisher(folder)
    for version in range(1_000_000):
        publisher.publish(0, version, [(f"w{i}", torch.full((50_000,), float(version))) for i in range(10)])
        told.send(version)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("delay", [0.0, 0.001, 0.002, 0.004, 0.007])
def test_kill_dash_nine_in_the_middle_of_writing(tmp_path: Path, delay: float) -> None:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=write_for_ever, args=(tmp_path, there))
    process.start()
    try:
        for _ in range(3):
            assert here.poll(30)
            here.recv()
        time.sleep(delay)
    finally:
        process.kill()
        process.join(10)
    opened = ShmSubscriber(tmp_path).open(verify=True)
    tensors = dict(opened.tensors())
    assert len(tensors) == 10
    assert all((t == float(opened.id.version)).all() for t in tensors.values())


def test_large_tensors_are_copied_and_checked_by_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is the same whatever the threads, also while it grows."""
    sent = {f"w{i}": torch.randn(300_000 + i) for i in range(12)} | weights()
    plain = ShmPublisher(tmp_path / "plain").publish(0, 0, sent.items())
    monkeypatch.setattr("asyncrl.weights.local.shm.threads_for", lambda size: 3)
    monkeypatch.setattr("asyncrl.weights.local.file.threads_for", lambda size: 3)
    publisher = ShmPublisher(tmp_path / "threads")
    files = []
    for version in range(3):
        assert publisher.publish(0, version, iter(sent.items())).digest == plain.digest
        opened = ShmSubscriber(tmp_path / "threads").open()
        files.append(bytes(opened.map))
        opened.close()
    whole = ShmSubscriber(tmp_path / "plain").open()
    assert set(files) == {bytes(whole.map)}
    path = max((tmp_path / "threads").glob("*.weights"))
    data = bytearray(path.read_bytes())
    data[5_000_000] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightsCorrupt, match="w4"):
        ShmSubscriber(tmp_path / "threads").open()
