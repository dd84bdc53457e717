from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.learner.__main__ import compute_alike
from asyncrl.learner.backends.hf.torch import TorchBackend
from asyncrl.learner.checkpoints.checkpoints import Checkpoints, complete, read
from asyncrl.learner.loop import Learner
from asyncrl.learner.objective.objective import Objective
from asyncrl.learner.trainer import Trainer
from asyncrl.tracking.series import check
from asyncrl.weights.local.shm import ShmPublisher, ShmSubscriber
from tests.learner.fake_buffer import FakeBuffer, FakeReporter
from tests.learner.tiny import tiny_config, tiny_model


class Killed(BaseException):
    """Stands for kill -9: nothing in the learner catches it."""


def checkpointed(folder: Path) -> None:
    """Waits for a checkpoint that is written beside the training."""
    deadline = time.monotonic() + 60
    while not complete(folder / "checkpoints"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def a_config(**learner: Any) -> Config:
    given = {"steps": 4, "checkpoint_every": 2}
    return tiny_config(**(given | learner))


def a_learner(config: Config, folder: Path, buffer: Any, reporter: FakeReporter) -> tuple[Learner, TorchBackend]:
    compute_alike(config)
    backend = TorchBackend(config, tiny_model(), device="cpu")
    learner = Learner(
        config,
        trainer=Trainer(config, backend, Objective(config.learner)),
        buffer=buffer,
        publisher=ShmPublisher(folder / "shm"),
        reporter=reporter,  # type: ignore[arg-type]
        checkpoints=Checkpoints(folder / "checkpoints", config.learner.keep_checkpoints),
        save_tokenizer=lambda path: (path / "tokenizer.json").write_text("{}"),
    )
    return learner, backend


def played(
    folder: Path, buffer: FakeBuffer, *, resume: bool = False, config: Config | None = None
) -> tuple[dict[str, Tensor], FakeReporter]:
    reporter = FakeReporter()
    learner, backend = a_learner(config or a_config(), folder, buffer, reporter)
    assert learner.run(resume=resume) is True
    return {n: t.clone() for n, t in backend.weights()}, reporter


def test_a_run_from_start_to_end(tmp_path: Path) -> None:
    buffer = FakeBuffer(steps=4)
    weights, reporter = played(tmp_path, buffer)
    assert buffer.outcomes == dict.fromkeys(range(4), "applied")
    assert buffer.published_versions == [(0, v) for v in range(5)]
    assert buffer.evaluations == [(0, 0), (0, 4)]
    assert [p.name for p in complete(tmp_path / "checkpoints")] == ["step-000002", "step-000004"]
    assert buffer.checkpoints == [2, 4]
    assert [kind for kind, _ in reporter.events][:3] == ["published", "ready", "eval"]
    assert [(e["label"], e["step"], e["sampled"], e["greedy"]) for e in reporter.of("eval")] == [
        ("start", 0, 0.25, 0.75),
        ("end", 4, 0.25, 0.75),
    ]
    assert reporter.events[-1] == ("ended", {"step": 4, "why": "all training steps are done"})
    steps = [(step, values) for step, values in reporter.steps if step is not None]
    assert [step for step, _ in steps] == [0, 1, 2, 3, 4, 4]
    for _, values in reporter.steps:
        check(values)
    tokens = [values["throughput/tokens_trained"] for step, values in steps if "weights/loss" in values]
    assert tokens == sorted(tokens)
    assert tokens[-1] == sum(t.num_policy_tokens for r in buffer.handed.values() for t in r.trajectories)
    received = ShmSubscriber(tmp_path / "shm").open()
    assert received.id.order == (0, 4)
    assert all(torch.equal(t, weights[n]) for n, t in received.tensors())


def test_cadence(tmp_path: Path) -> None:
    config = Config.model_validate({**a_config(steps=5).model_dump(), "weights": {"every": 2}})
    buffer = FakeBuffer(steps=5)
    played(tmp_path, buffer, config=config)
    assert buffer.published_versions == [(0, 0), (0, 2), (0, 4), (0, 5)]


@pytest.mark.parametrize(
    "learner",
    [
        {},
        {"minibatches": 2, "warmup_steps": 3, "schedule": "cosine"},
        {"lora": {"r": 4}, "kl_coef": 0.1, "reference_every": 2},
    ],
)
def test_resuming_equals_never_having_stopped_bit_for_bit(tmp_path: Path, learner: dict[str, Any]) -> None:
    config = a_config(**learner)
    whole, _ = played(tmp_path / "whole", FakeBuffer(steps=4), config=config)
    buffer = FakeBuffer(steps=4)

    def kill(b: int) -> None:
        if b == 3:
            checkpointed(tmp_path / "parts")
            raise Killed

    buffer.on_batch = kill
    reporter = FakeReporter()
    with pytest.raises(Killed):
        a_learner(config, tmp_path / "parts", buffer, reporter)[0].run(resume=False)
    assert buffer.outcomes == dict.fromkeys(range(3), "applied")
    buffer.on_batch = None
    resumed, reporter = played(tmp_path / "parts", buffer, resume=True, config=config)
    assert buffer.asked == [0, 1, 2, 3, 2, 3, 4], "batch 2 is redone: the checkpoint is of version 2"
    assert buffer.published_versions == [(0, v) for v in range(5)], "nothing is published twice"
    assert len(reporter.of("resumed")) == 1
    assert [e["label"] for e in reporter.of("eval")] == ["end"]
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[n], resumed[n]) for n in whole)


def test_a_resume_with_other_threads_says_nothing_of_redone_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """None is redone: `learner.threads` and `learner.ranks` are settings, and the buffer begins a branch instead."""
    buffer = FakeBuffer(steps=4)
    played(tmp_path, buffer)
    _, reporter = played(tmp_path, buffer, resume=True, config=a_config(threads=2))
    assert reporter.of("resumed")
    assert "redone" not in caplog.text


def test_a_death_before_the_first_checkpoint_begins_again(tmp_path: Path) -> None:
    buffer = FakeBuffer(steps=4)

    def kill(b: int) -> None:
        if b == 1:
            raise Killed

    buffer.on_batch = kill
    with pytest.raises(Killed):
        a_learner(a_config(), tmp_path, buffer, FakeReporter())[0].run(resume=False)
    buffer.on_batch = None
    played(tmp_path, buffer, resume=True)
    assert buffer.asked == [0, 1, 0, 1, 2, 3, 4]
    assert buffer.published_versions == [(0, v) for v in range(5)]


def test_stopped_in_order_it_leaves_a_checkpoint(tmp_path: Path) -> None:
    buffer = FakeBuffer(steps=4)
    reporter = FakeReporter()
    learner, _ = a_learner(a_config(), tmp_path, buffer, reporter)
    buffer.on_batch = lambda b: learner.stop() if b == 2 else None
    assert learner.run(resume=False) is False, "the run is not over"
    assert buffer.outcomes == dict.fromkeys(range(3), "applied"), "the step that runs is finished"
    assert complete(tmp_path / "checkpoints")[-1].name == "step-000003"
    assert not reporter.of("ended")
    assert (0, 4) not in buffer.evaluations
    buffer.on_batch = None
    played(tmp_path, buffer, resume=True)
    assert buffer.asked == [0, 1, 2, 3, 4]


def test_stopped_during_the_last_evaluation_the_run_has_not_ended(tmp_path: Path) -> None:
    buffer, reporter = FakeBuffer(steps=1), FakeReporter()
    learner, _ = a_learner(a_config(steps=1), tmp_path, buffer, reporter)
    buffer.on_evaluation = lambda pinned: learner.stop() if pinned[1] else None
    assert learner.run(resume=False) is False
    assert not reporter.of("ended")
    assert [e["label"] for e in reporter.of("eval")] == ["start"]
    buffer.on_evaluation = None
    _, reporter = played(tmp_path, buffer, resume=True, config=a_config(steps=1))
    assert [e["label"] for e in reporter.of("eval")] == ["end"]
    assert reporter.of("ended")


def test_weights_lost_with_the_memory_that_held_them_are_published_again(tmp_path: Path) -> None:
    buffer = FakeBuffer(steps=3)
    played(tmp_path, buffer, config=a_config(steps=3))
    for file in (tmp_path / "shm").iterdir():
        file.unlink()
    buffer.steps = 4
    played(tmp_path, buffer, resume=True)
    assert buffer.published_versions[-2:] == [(0, 3), (0, 4)]
    assert buffer.evaluations == [(0, 0), (0, 3), (0, 4)]


def test_guard_keeps_the_version_and_goes_on(tmp_path: Path) -> None:
    config = a_config(min_ess=0.15, corrections=({"name": "icepop"},))
    buffer, reporter = FakeBuffer(steps=4), FakeReporter()
    learner, backend = a_learner(config, tmp_path, buffer, reporter)
    before: dict[str, Tensor] = {}

    def spoil(b: int) -> None:
        if b == 1:
            buffer.handed[1] = buffer._made(1)
            for row in (row for t in buffer.handed[1].trajectories for row in t.rows):
                row.logprobs[:-2][row.mask[:-2]] = -60.0
            before.update({n: t.clone() for n, t in backend.weights()})
        if b == 2:
            assert all(torch.equal(t, before[n]) for n, t in backend.weights())

    buffer.on_batch = spoil
    learner.run(resume=False)
    assert buffer.outcomes == {0: "applied", 1: "guard", 2: "applied", 3: "applied", 4: "applied"}
    assert "learner.min_ess" in reporter.of("guard")[0]["why"]
    assert buffer.published_versions == [(0, v) for v in range(5)]
    newest = complete(tmp_path / "checkpoints")[-1]
    assert newest.name == "step-000004-b000005-br0"
    _, done = read(newest)
    assert [(d.batch, d.outcome) for d in done] == list(buffer.outcomes.items())
    assert sorted(g for d in done for g in d.groups) == list(range(20))


def test_a_poisoned_batch_is_passed_over(tmp_path: Path) -> None:
    buffer = FakeBuffer(steps=2)
    buffer.poisoned = {1}
    _, reporter = played(tmp_path, buffer, config=a_config(steps=2))
    assert buffer.outcomes == {0: "applied", 1: "poison", 2: "applied"}
    assert reporter.of("skipped")[0]["batch"] == 1


def test_waits_are_named_and_an_outage_is_sat_out(tmp_path: Path) -> None:
    buffer = FakeBuffer(steps=1)
    buffer.waits, buffer.outages = 3, 2
    _, reporter = played(tmp_path, buffer, config=a_config(steps=1))
    assert buffer.outcomes == {0: "applied"}
    assert {"batch", "buffer", "evaluation", "checkpoint", "publish"} <= set(reporter.causes)


def test_an_outage_without_end_ends_the_run(tmp_path: Path) -> None:
    buffer = FakeBuffer(steps=1)
    buffer.outages = 1_000_000
    config = Config.model_validate({**a_config().model_dump(), "launch": {"restart_window_s": 0.05}})
    with pytest.raises(RunError, match="did not answer batch"):
        played(tmp_path, buffer, config=config)


def test_a_run_that_cannot_go_on_says_so(tmp_path: Path) -> None:
    buffer = FakeBuffer(steps=1)
    buffer.fail_why = "4 batches in a row were skipped"
    with pytest.raises(RunError, match="4 batches in a row"):
        played(tmp_path, buffer)


def test_a_new_branch_is_published_at_once(tmp_path: Path) -> None:
    buffer = FakeBuffer(steps=3)

    def fork(b: int) -> None:
        if b == 2:
            buffer.branch = 1

    buffer.on_batch = fork
    _, reporter = played(tmp_path, buffer, config=a_config(steps=3))
    assert buffer.published_versions == [(0, 0), (0, 1), (0, 2), (1, 2), (1, 3)]
    assert reporter.of("branch") == [{"step": 2, "branch": 1}]
    latest = ShmSubscriber(tmp_path / "shm").latest()
    assert latest is not None
    assert latest.order == (1, 3)


def test_fresh_at_a_checkpoint_begins_a_branch_and_a_death_on_it_stays_there(tmp_path: Path) -> None:
    buffer = FakeBuffer(steps=4)
    played(tmp_path, buffer)
    at = tmp_path / "checkpoints" / "step-000002"
    begun: list[int] = []
    buffer.asked.clear()
    buffer.on_batch = lambda b: (_ for _ in ()).throw(Killed()) if b == 3 else None
    learner = a_learner(a_config(), tmp_path, buffer, FakeReporter())[0]
    with pytest.raises(Killed):
        learner.run(resume=True, branch_from=at, on_branch=lambda: begun.append(buffer.branch))
    assert begun == [1], "told once, when the buffer has recorded the branch"
    assert buffer.asked == [2, 3]
    assert buffer.published_versions[5:] == [(1, 2), (1, 3)]
    buffer.on_batch, buffer.off_line = None, {4}
    _, reporter = played(tmp_path, buffer, resume=True)
    assert buffer.asked == [2, 3, 2, 3, 4], "the newest checkpoint is of the line that was left"
    assert reporter.of("resumed")[0]["checkpoint"] == str(at)
    assert [p.name for p in complete(tmp_path / "checkpoints")][-1] == "step-000004-b000004-br1"
    assert buffer.evaluations[-1] == (1, 4), "evaluated again"


def test_when_no_checkpoint_is_known_to_the_ledger_it_says_so(tmp_path: Path) -> None:
    buffer = FakeBuffer(steps=4)
    played(tmp_path, buffer)
    buffer.off_line = {2, 4}
    with pytest.raises(RunError, match="no point of the line"):
        played(tmp_path, buffer, resume=True)


def test_a_batch_of_another_version_is_refused(tmp_path: Path) -> None:
    buffer = FakeBuffer(steps=3)
    reply = buffer._made(0)
    object.__setattr__(reply, "version", 5)
    buffer.handed[0] = reply
    with pytest.raises(RunError, match="is for version 5, the learner holds 0"):
        played(tmp_path, buffer)


def test_no_evaluation_when_none_is_asked_for(tmp_path: Path) -> None:
    config = Config.model_validate({**a_config().model_dump(), "eval": {"tasks": 0}})
    buffer = FakeBuffer(steps=4)
    played(tmp_path, buffer, config=config)
    assert not buffer.evaluations


def test_at_an_evaluation_step_weights_are_published_and_kept_whatever_the_cadence(tmp_path: Path) -> None:
    """`weights.every` 4 and `eval.every` 3: the pinned version can be had until its sets are done, and training goes
    on meanwhile; what was skipped is not evaluated at a later step either."""
    values = a_config(steps=8, checkpoint_every=20).model_dump()
    changed = {"weights": {"every": 4}, "eval": {"tasks": 4, "every": 3}}
    config = Config.model_validate(values | changed | {"buffer": {"max_staleness": 3, "capacity": 99}})
    buffer, reporter, seen = FakeBuffer(steps=8), FakeReporter(), ShmSubscriber(tmp_path / "shm")
    buffer.eval_every = 3
    pinned: list[Any] = []

    def on_batch(b: int) -> None:
        pinned.append(None if (at := seen.pinned()) is None else at.order)
        if pinned[-1] is not None:
            seen.open(version=pinned[-1]).close()
        if b == 5:
            buffer.play_evaluation()

    buffer.on_batch = on_batch
    learner, _ = a_learner(config, tmp_path, buffer, reporter)
    learner.run(resume=False)
    assert buffer.published_versions == [(0, v) for v in (0, 3, 4, 6, 8)]
    assert pinned == [None, None, None, (0, 3), (0, 3), (0, 3), (0, 6), (0, 6), (0, 6)]
    assert [(e["label"], e["step"]) for e in reporter.of("eval")] == [("start", 0), ("step", 3), ("end", 6), ("end", 8)]
    assert seen.pinned() is None
    assert not list((tmp_path / "shm").glob("*.pinned"))
    assert buffer.asked_for_all.index(False) < len(buffer.asked_for_all) - 1 - buffer.asked_for_all[::-1].index(False)


def test_a_pinned_version_that_is_gone_is_said_to_be_lost(tmp_path: Path) -> None:
    """A learner that resumes behind it, without the memory that held it."""
    buffer, reporter = FakeBuffer(steps=4), FakeReporter()
    buffer.eval_every = 1
    config = a_config()
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"every": 1})})
    learner, _ = a_learner(config, tmp_path, buffer, reporter)
    buffer.on_batch = lambda b: learner.stop() if b == 2 else None
    learner.run(resume=False)
    assert buffer.open == [(0, 1)], "still open, pinned to it"
    for file in (tmp_path / "shm").iterdir():
        file.unlink()
    buffer.on_batch = None
    _, reporter = played(tmp_path, buffer, resume=True, config=config)
    assert [e["step"] for e in reporter.of("eval")][-1] == 4
    assert buffer.evaluations == [(0, 0), (0, 1), (0, 4)]


@pytest.mark.system
def test_a_run_begun_again_does_not_wait_for_an_evaluation_of_a_version_that_it_has_yet_to_make_again(
    tmp_path: Path,
) -> None:
    """A host that was lost before the first checkpoint, while a set was open: it stopped training for good."""
    buffer = FakeBuffer(steps=4)
    buffer.eval_every = 2
    buffer.evaluations, buffer.open = [(0, 0), (0, 2)], [(0, 2)]
    asked: list[bool] = []
    buffer.on_batch = lambda b: asked.extend(buffer.asked_for_all if b == 0 else ())
    config = a_config()
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"every": 2})})
    _, reporter = played(tmp_path, buffer, config=config)
    assert asked
    assert True not in asked, "nobody else was told to play it"
    assert [e["step"] for e in reporter.of("eval")][-1] == 4
