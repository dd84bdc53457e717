"""Rank 0 leads and the others follow: together they do what one process does alone."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.learner.__main__ import compute_alike
from asyncrl.learner.backends.gpu import take_gpu
from asyncrl.learner.backends.hf.fsdp2 import Fsdp2Backend
from asyncrl.learner.checkpoints.checkpoints import Checkpoints, State, complete, read
from asyncrl.learner.follower import Follower
from asyncrl.learner.loop import Learner
from asyncrl.learner.objective.objective import Objective
from asyncrl.learner.ranks import DistributedRanks, Order, Ranks
from asyncrl.learner.trainer import Trainer
from asyncrl.weights.local.shm import ShmPublisher
from tests.learner.fake_buffer import FakeBuffer, FakeReporter
from tests.learner.ranks import on_ranks
from tests.learner.test_loop import Killed, checkpointed
from tests.learner.test_loop import played as alone
from tests.learner.tiny import tiny_config, tiny_model
from tests.waiting import until


def a_config(ranks: int, **learner: Any) -> Config:
    given = {"steps": 4, "checkpoint_every": 2, "ranks": ranks, "backend": "fsdp2", "minibatches": 2}
    return tiny_config(**(given | learner))


def rank(
    number: int, rendezvous: Path, folder: Path, config: Config, resume: bool, outcomes: dict[int, str], die_at: int
) -> dict[str, Any]:
    """One rank from its start to its end; at batch `die_at` all of them are gone."""
    compute_alike(config)
    ranks = DistributedRanks(config, number, rendezvous) if config.learner.ranks > 1 else Ranks()
    backend = Fsdp2Backend(config, tiny_model(), device="cpu")
    trainer, buffer, reporter = Trainer(config, backend, Objective(config.learner)), FakeBuffer(4), FakeReporter()
    buffer.outcomes, buffer.incarnation = dict(outcomes), 0
    if resume:
        buffer.published_versions = [(0, v) for v in range(3)]
    if number:
        follower = Follower(trainer, ranks=ranks, buffer=buffer, reporter=reporter, patience_s=1.0)  # type: ignore[arg-type]

        def done(b: int) -> None:
            if b == die_at:
                raise Killed
            if b:
                buffer.outcomes[b - 1] = "applied"  # rank 0 told the one buffer that there is

        buffer.on_batch = done
        buffer.incarnation = 1 if resume else 0
        with contextlib.suppress(Killed):
            follower.run()
        return {}
    buffer.waits = 2

    def killed(b: int) -> None:
        if b == die_at:
            checkpointed(folder)
            ranks.order(Order("train", incarnation=buffer.incarnation, batch=b, version=b))
            raise Killed

    buffer.incarnation = 0 if resume else -1
    buffer.on_batch = killed
    learner = Learner(
        config,
        trainer=trainer,
        ranks=ranks,
        buffer=buffer,  # type: ignore[arg-type]
        publisher=ShmPublisher(folder / f"shm-{resume}"),
        reporter=reporter,  # type: ignore[arg-type]
        checkpoints=Checkpoints(folder / "checkpoints", 2),
        save_tokenizer=lambda path: None,
    )
    try:
        learner.run(resume=resume)
    except Killed:
        return {"asked": buffer.asked}
    metrics = [values for step, values in reporter.steps if "weights/loss" in values]
    return {"asked": buffer.asked, "metrics": metrics, "published": buffer.published_versions}


def saved(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(complete(folder / "checkpoints")[-1] / "hf" / "model-00001.safetensors")


def same(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float) -> None:
    """Adam divides a gradient by its own size: of an element whose gradient is near 0, rounding alone becomes a part of
    the learning rate. So two elements may differ by more, up to 10 times; the mean is bounded at a hundredth."""
    assert {n for n in a if n in b} == set(a)
    off = torch.cat([(a[n] - b[n]).abs().flatten() for n in a])
    assert int((off > tolerance).sum()) <= 2
    assert float(off.max()) <= 10 * tolerance
    assert float(off.mean()) <= tolerance / 100


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    weights, reporter = alone(
        tmp_path_factory.mktemp("alone"), FakeBuffer(4), config=a_config(1, backend="torch", minibatches=2)
    )
    return weights, [values for _, values in reporter.steps if "weights/loss" in values]


@pytest.mark.system
def test_two_ranks_train_what_one_process_trains(tmp_path: Path, reference: Any) -> None:
    lead, _ = on_ranks(2, tmp_path / "meet", rank, tmp_path, a_config(2), False, {}, -1, joined=False)
    weights, metrics = reference
    same(saved(tmp_path), weights, 1e-6)
    assert lead["published"] == [(0, v) for v in range(5)]
    for mine, theirs in zip(lead["metrics"], metrics, strict=True):
        for name in ("weights/loss", "weights/grad_norm", "correction/sequence_ess", "reward/mean", "staleness/mean"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5), name
    state, done = read(complete(tmp_path / "checkpoints")[-1])
    assert (state.version, state.ranks) == (4, 2)
    assert sorted(g for d in done for g in d.groups) == list(range(16)), "the groups of all shares"


@pytest.mark.system
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.system
def test_after_the_death_of_all_another_number_goes_on(tmp_path: Path, reference: Any, ranks: int) -> None:
    first = on_ranks(2, tmp_path / "first", rank, tmp_path, a_config(2), False, {}, 3, joined=False)
    assert first[0]["asked"][-1] == 3
    applied = dict.fromkeys(range(3), "applied")
    config = a_config(ranks)
    again = on_ranks(ranks, tmp_path / "again", rank, tmp_path, config, True, applied, -1, joined=False)
    assert again[0]["asked"] == [2, 2, 2, 3, 4], "from the checkpoint of version 2, after two waits"
    assert again[0]["published"][3:] == [(0, 2), (0, 3), (0, 4)]
    same(saved(tmp_path), reference[0], 2e-6)


def save_for_ever(number: int, rendezvous: Path, folder: Path, delay: float) -> str:
    config = a_config(2, collective_s=20.0)
    ranks = DistributedRanks(config, number, rendezvous)
    backend = Fsdp2Backend(config, tiny_model(), device="cpu")

    def save(target: Path) -> Callable[[], None]:
        ranks.order(Order("save", str(target)))
        write = backend.snapshot()
        return lambda: write(target)

    checkpoints = Checkpoints(folder, 2) if number == 0 else None
    try:
        for v in range(100):
            if checkpoints is not None:
                checkpoints.write(State(v, v, 0, 1, 2), [], save, lambda _: None)
                continue
            target, write = Path(ranks.next().path), backend.snapshot()
            if v == 3:
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            write(target)
    except RunError as error:
        return f"the run would end: {error}"
    except RuntimeError as error:
        return str(error)
    return "nobody was killed"


SYSTEM = pytest.mark.system


@pytest.mark.parametrize("delay", [pytest.param(0.0, marks=SYSTEM), 0.004, pytest.param(0.012, marks=SYSTEM)])
@pytest.mark.system
def test_a_rank_killed_dead_while_it_saves_leaves_the_checkpoint_before(tmp_path: Path, delay: float) -> None:
    why, killed = on_ranks(2, tmp_path / "meet", save_for_ever, tmp_path / "checkpoints", delay, joined=False)
    assert killed is None
    assert "the run would end" not in why
    assert "nobody" not in why
    found = complete(tmp_path / "checkpoints")
    assert len(found) == 2
    for path in found:
        read(path)
    on_ranks(1, tmp_path / "again", loads, found[-1])


def loads(path: Path) -> None:
    Fsdp2Backend(a_config(1), tiny_model(seed=9), device="cpu").load(path)


def test_each_rank_takes_its_share_of_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, float]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: asked.append(("gpu", gpu)))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share: asked.append(("share", share)))
    take_gpu(a_config(2, gpu_memory=0.5), 1)
    assert asked == [("gpu", 1), ("share", 0.5)]


def silent(number: int, rendezvous: Path, config: Config) -> float:
    ranks = DistributedRanks(config, number, rendezvous)
    began = time.monotonic()
    given_up = rendezvous.with_name("given-up")
    if number == 0:
        assert until(given_up.exists, 60.0), "the other rank still waits"
        return 0.0
    with pytest.raises(RuntimeError):
        ranks.next()
    given_up.touch()
    return time.monotonic() - began


@pytest.mark.system
def test_a_rank_that_hears_nothing_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.learner.ranks.SPARE_S", 0.0)
    config = in_a_hurry(checkpoint_s=1.0)
    waited = on_ranks(2, tmp_path / "meet", silent, config, joined=False)
    assert waited[1] > 1.5, "the exchange and the checkpoint may take their time"


def in_a_hurry(**learner: Any) -> Config:
    hurried = a_config(2, collective_s=1.0, **learner)
    return Config.model_validate({**hurried.model_dump(), "launch": {"restart_window_s": 1.0}})


def on_a_slow_disk(number: int, rendezvous: Path, folder: Path, config: Config) -> str:
    ranks = DistributedRanks(config, number, rendezvous)
    backend = Fsdp2Backend(config, tiny_model(), device="cpu")
    if number == 0:
        ranks.order(Order("save", str(folder)))
        backend.save(folder)
        time.sleep(3.0)  # at the next checkpoint it would wait so for this one
        ranks.order(Order("end"))
        return "end"
    assert ranks.next().do == "save"
    write = backend.snapshot()
    time.sleep(2.0)
    write(folder)
    return ranks.next().do


@pytest.mark.system
def test_a_checkpoint_takes_longer_than_an_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.learner.ranks.SPARE_S", 0.0)
    told = on_ranks(
        2, tmp_path / "meet", on_a_slow_disk, tmp_path / "checkpoint", in_a_hurry(checkpoint_s=20.0), joined=False
    )
    assert told == ["end", "end"]
