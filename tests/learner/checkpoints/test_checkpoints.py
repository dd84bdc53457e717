from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.errors import RunError
from asyncrl.learner.backends.hf.torch import TorchBackend
from asyncrl.learner.checkpoints.checkpoints import Checkpoints, Done, State, complete, group_digests, read
from tests.learner.tiny import tiny_config, tiny_model


def save(folder: Path) -> Callable[[], None]:
    (folder / "hf").mkdir()
    return lambda: (folder / "hf" / "weights").write_bytes(bytes(range(256))) and None


def announce(folder: Path) -> None:
    (folder / "buffer").mkdir()
    (folder / "buffer" / "ledger").write_text("ledger")


DONE = [Done(0, "applied", {3: "aa", 4: "bb"}), Done(1, "skipped", {})]


def written(folder: Path, *versions: int, keep: int = 2) -> list[Path]:
    checkpoints = Checkpoints(folder, keep)
    return [checkpoints.write(State(v, v, 0, 1), DONE, save, announce) for v in versions]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    torch.manual_seed(5)
    (path,) = written(tmp_path, 20)
    expected = torch.rand(3)
    assert [path] == complete(tmp_path) == [tmp_path / "step-000020"]
    state, done = read(path)
    assert state == State(20, 20, 0, 1)
    assert done == DONE
    assert torch.equal(torch.rand(3), expected), "torch's random state goes on from the checkpoint"
    assert (path / "buffer" / "ledger").is_file()
    assert [p.name for p in tmp_path.iterdir()] == ["step-000020"]


def test_oldest_go(tmp_path: Path) -> None:
    written(tmp_path, 2, 4, 6, 8, keep=3)
    assert [p.name for p in complete(tmp_path)] == ["step-000004", "step-000006", "step-000008"]


def test_newest_is_by_branch_then_batch(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 10)
    for state in (State(8, 9, 0, 1), State(8, 8, 0, 1), State(3, 3, 1, 1)):
        checkpoints.write(state, [], save, announce)
    assert [p.name for p in complete(tmp_path)] == [
        "step-000008",
        "step-000008-b000009-br0",
        "step-000003-b000003-br1",
    ]


def test_a_redone_checkpoint_stays_as_it_is(tmp_path: Path) -> None:
    (path,) = written(tmp_path, 2)
    before = (path / "state.json").stat().st_mtime_ns
    asked: list[Path] = []
    Checkpoints(tmp_path, 2).write(State(2, 2, 0, 1), DONE, save, asked.append)
    assert (path / "state.json").stat().st_mtime_ns == before
    assert not asked


def test_nothing_there(tmp_path: Path) -> None:
    assert complete(tmp_path) == []
    assert complete(tmp_path / "nowhere") == []


@pytest.mark.parametrize("file", ["hf/weights", "rng.pt", "batches.jsonl", "state.json"])
@pytest.mark.parametrize("how", ["altered", "missing", "empty"])
def test_damage_is_found_and_the_remedy_named(tmp_path: Path, file: str, how: str) -> None:
    (path,) = written(tmp_path, 2)
    target = path / file
    if how == "missing":
        target.unlink()
    elif how == "empty":
        target.write_bytes(b"")
    else:
        data = bytearray(target.read_bytes())
        data[len(data) // 2] ^= 2
        target.write_bytes(bytes(data))
    with pytest.raises(RunError, match=r"step-000002 is damaged .*--resume takes the one before it"):
        read(path)


def test_a_failing_save_leaves_the_one_before(tmp_path: Path) -> None:
    (path,) = written(tmp_path, 2)

    def full(*_: Path) -> None:
        raise OSError(28, "No space left on device")

    for saving, announcing in ((full, announce), (lambda _: full, announce), (save, full)):
        with pytest.raises(RunError, match="No space left on device"):
            Checkpoints(tmp_path, 2).write(State(4, 4, 0, 1), DONE, saving, announcing)
        assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_it_is_written_beside_the_training_and_one_at_a_time(tmp_path: Path) -> None:
    go_on, checkpoints = threading.Event(), Checkpoints(tmp_path, 2)

    def slow(folder: Path) -> Callable[[], None]:
        written = save(folder)
        return lambda: written() if go_on.wait(20) else None

    checkpoints.begin(State(2, 2, 0, 1), DONE, slow, announce)
    assert checkpoints.completed() == []
    assert complete(tmp_path) == [], "nothing has its name before all of it is there"
    go_on.set()
    checkpoints.begin(State(4, 4, 0, 1), DONE, slow, announce)
    assert (2, tmp_path / "step-000002") in checkpoints.completed()
    checkpoints.settle()
    assert [p.name for p in complete(tmp_path)] == ["step-000002", "step-000004"]


def test_a_failure_beside_the_training_is_raised(tmp_path: Path) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.begin(State(4, 4, 0, 1), DONE, lambda _: full, announce)
    with pytest.raises(RunError, match="No space left on device"):
        checkpoints.settle()
    assert not list(tmp_path.iterdir())


def test_a_disk_that_stands_still_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    go_on, checkpoints = threading.Event(), Checkpoints(tmp_path, 2, deadline_s=0.1)
    checkpoints.begin(State(2, 2, 0, 1), DONE, lambda _: lambda: go_on.wait(20) and None, announce)
    try:
        for wait in (checkpoints.settle, lambda: checkpoints.begin(State(4, 4, 0, 1), DONE, save, announce)):
            with pytest.raises(RunError, match=r"learner\.checkpoint_s = 0\.1 s.*--resume"):
                wait()
        assert complete(tmp_path) == []
    finally:
        go_on.set()


def test_what_was_cut_off_is_no_checkpoint_and_is_swept_up(tmp_path: Path) -> None:
    def interrupted(_: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Checkpoints(tmp_path, 2).write(State(4, 4, 0, 1), DONE, save, interrupted)
    assert complete(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 1
    Checkpoints(tmp_path, 2)
    assert not list(tmp_path.iterdir())


def write_for_ever(folder: Path, told: Connection) -> None:
    def saving(target: Path) -> Callable[[], None]:
        def write() -> None:
            for i in range(20):
                (target / f"part{i}").write_bytes(bytes(20_000))

        return write

    checkpoints = Checkpoints(folder, 2)
    for v in range(100_000):
        checkpoints.write(State(v, v, 0, 1), [], saving, announce)
        told.send(v)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("delay", [0.0, 0.002, 0.005, 0.011])
def test_kill_dash_nine_leaves_complete_checkpoints_only(tmp_path: Path, delay: float) -> None:
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
    found = complete(tmp_path)
    assert found
    for path in found:
        state, _ = read(path)
        assert path.name == state.name
        assert len(list(path.glob("part*"))) == 20
        assert (path / "buffer" / "ledger").is_file()


def test_transformers_loads_what_is_exported(tmp_path: Path) -> None:
    backend = TorchBackend(tiny_config(), tiny_model(), device="cpu")
    backend.save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = torch.arange(10)[None]
    torch.testing.assert_close(loaded(ids).logits, tiny_model()(ids).logits, atol=1e-5, rtol=1e-5)
    assert "varlen" not in json.dumps(json.loads((tmp_path / "hf" / "config.json").read_text()))


def test_digest_of_a_group_is_over_its_members_in_any_order() -> None:
    a = group_digests([1, 1, 2], ("x", "y", "z"))
    assert a == group_digests([2, 1, 1], ("z", "y", "x"))
    assert a[1] != group_digests([1, 1], ("x", "x"))[1]
