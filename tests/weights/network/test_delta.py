"""A delta gives the very bits of the new version, or says that it is none."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.weights.local.file import digest_of, read_index, verify
from asyncrl.weights.local.folder import File, Watch
from asyncrl.weights.local.shm import ShmPublisher
from asyncrl.weights.network import delta
from asyncrl.weights.protocol import WeightsCorrupt

Tensors = dict[str, torch.Tensor]


def model(seed: int, dtype: torch.dtype) -> Tensors:
    g = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(200, 16, generator=g).to(dtype),
        "norm": torch.ones(16),
        "ids": torch.arange(7),
        "flag": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
    }


def published(folder: Path, versions: list[Tensors]) -> list[File]:
    publisher, watch = ShmPublisher(folder, keep=len(versions) + 1), Watch(folder)
    files = []
    for version, tensors in enumerate(versions):
        publisher.publish(0, version, tensors.items())
        files.append(watch.file(verify_bytes=True))
    return files


def patched(made: bytes, old: File) -> bytearray:
    end = max(e.end for e in old.entries)
    to = bytearray(end)
    index = delta.apply(made, old.map, old.entries, to)
    return to + index


def close(*files: File) -> None:
    for file in files:
        file.close()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_change_comes_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8]))
    share = data.draw(st.sampled_from([0.0, 0.001, 0.05, 0.6, 1.0]))
    size = data.draw(st.sampled_from([1e-7, 1e-3, 1.0, 1e30, float("nan")]))
    before = model(data.draw(st.integers(0, 5)), dtype)
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 5)))
    after = dict(before)
    chosen = torch.rand(before["embed"].shape, generator=g) < share
    moved = (before["embed"].double() + size * torch.randn(before["embed"].shape, generator=g).double()).to(dtype)
    after["embed"] = torch.where(chosen, moved, before["embed"])
    old, new = published(tmp_path_factory.mktemp("w"), [before, after])
    made = delta.make(old.map, old.entries, new.map, new.entries)
    assert made is not None
    assert patched(made, old) == bytes(new.map)
    close(old, new)


def test_blocks_gaps_and_moves_of_every_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "BLOCK", 1000)
    before = {"w": torch.zeros(10_000, dtype=torch.int32), "v": torch.zeros(3000, dtype=torch.int64)}
    after = {k: v.clone() for k, v in before.items()}
    for where, value in [
        (0, 1),
        (254, -1),
        (255, 127),
        (510, 128),
        (999, -(2**31)),
        (1000, 70_000),
        (9_999, 2**31 - 1),
    ]:
        after["w"][where] = value
    after["v"][1000:1900] = torch.arange(900) * 10**15
    old, new = published(tmp_path, [before, after])
    made = delta.make(old.map, old.entries, new.map, new.entries)
    assert made is not None
    assert patched(made, old) == bytes(new.map)
    close(old, new)


def test_bfloat16_at_a_small_learning_rate_is_few_bytes(tmp_path: Path) -> None:
    """AdamW moves each weight by about the learning rate: a hundredth of them by a unit in the last place."""
    g = torch.Generator().manual_seed(0)
    master = 0.02 * torch.randn(400_000, generator=g)
    moved = master - 1e-6 * torch.sign(torch.randn(400_000, generator=g))
    old, new = published(tmp_path, [{"w": master.bfloat16()}, {"w": moved.bfloat16()}])
    made = delta.make(old.map, old.entries, new.map, new.entries)
    assert made is not None
    assert len(made) * 20 < len(new.map)
    close(old, new)


def test_other_tensors_have_no_delta(tmp_path: Path) -> None:
    first = model(0, torch.float32)
    others = [first, {k: v for k, v in first.items() if k != "ids"}, first | {"embed": torch.zeros(200, 17)}]
    files = published(tmp_path, others)
    for other in files[1:]:
        assert delta.make(files[0].map, files[0].entries, other.map, other.entries) is None
    close(*files)


def test_the_wrong_base_is_refused(tmp_path: Path) -> None:
    files = published(tmp_path, [model(seed, torch.bfloat16) for seed in range(3)])
    made = delta.make(files[0].map, files[0].entries, files[1].map, files[1].entries)
    assert made is not None
    with pytest.raises(WeightsCorrupt, match="not against what is held"):
        patched(made, files[2])
    close(*files)


def mutations(good: bytes, count: int, seed: int) -> list[bytes]:
    """Bytes flipped, cut, doubled, put in; half of them in the header."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        bad = bytearray(good)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(min(len(bad), 400) if rng.random() < 0.5 else len(bad))
            match rng.randrange(4):
                case 0:
                    bad[at] ^= 1 << rng.randrange(8)
                case 1:
                    del bad[at:]
                    bad += b"\0"
                case 2:
                    bad[at:at] = rng.randbytes(rng.randrange(1, 9))
                case 3:
                    bad[at] = rng.randrange(256)
        made.append(bytes(bad))
    return made


def test_twenty_thousand_mutations_of_a_delta_and_of_a_file(tmp_path: Path) -> None:
    """Whatever comes, it is the right bits or WeightsCorrupt."""
    before = {"w": 0.02 * torch.randn(300).bfloat16(), "b": torch.zeros(4)}
    after = {"w": before["w"] * 1.01, "b": torch.ones(4)}
    old, new = published(tmp_path, [before, after])
    made = delta.make(old.map, old.entries, new.map, new.entries)
    assert made is not None
    right, refused = bytes(new.map), 0
    for bad in mutations(made, 10_000, seed=1):
        try:
            got = patched(bad, old)
            entries = read_index(got, "got")
            verify(got, entries, "got")
            assert digest_of(entries) != new.id.digest or got == right
        except WeightsCorrupt:
            refused += 1
    for bad in mutations(right, 10_000, seed=2):
        try:
            entries = read_index(bad, "bad")
            verify(bad, entries, "bad")
            same = all(bad[e.offset : e.end] == right[e.offset : e.end] for e in entries)
            assert digest_of(entries) != new.id.digest or same
        except WeightsCorrupt:
            refused += 1
    assert refused > 15_000
    close(old, new)
