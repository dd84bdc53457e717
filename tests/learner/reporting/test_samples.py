"""The samples of a step are what its record holds, and cost it nothing but copies."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.buffer.client import BatchReply
from asyncrl.config.launch import TrackingConfig
from asyncrl.learner.__main__ import compute_alike
from asyncrl.learner.backends.hf.torch import TorchBackend
from asyncrl.learner.batch import Batch
from asyncrl.learner.objective.objective import Objective
from asyncrl.learner.reporting import samples
from asyncrl.learner.reporting.samples import Samples
from asyncrl.learner.step.train_step import StepResult
from asyncrl.learner.trainer import Trainer
from asyncrl.tracking.rollouts import store
from asyncrl.tracking.rollouts.text import TokenText
from tests.learner.fake_buffer import FakeBuffer
from tests.learner.tiny import random_trajectory, tiny_config, tiny_model
from tests.waiting import until

Step = tuple[BatchReply, Batch, StepResult]


def words(ids: Any) -> str:
    return "".join(f"w{int(id)} " for id in ids)


def a_step(**given: Any) -> Step:
    """A batch of two rows per trajectory, in an order that is not the batch's, one token of each row over age."""
    config = tiny_config(corrections=[{"name": "tis", "cap": 1.01}, {"name": "icepop"}])
    compute_alike(config)
    rng = np.random.default_rng(3)
    trajectories = [random_trajectory(g, i, rng, rows=2, versions=(0, 2)) for g in (7, 4, 9) for i in range(4)]
    trajectories = [trajectories[i] for i in rng.permutation(len(trajectories))]
    buffer = FakeBuffer(1)
    reply = replace(
        buffer._reply("ready", "", 0, trajectories=trajectories, groups=(7, 4, 9)), version=2, mask_before=1, **given
    )
    trainer = Trainer(config, TorchBackend(config, tiny_model(), device="cpu"), Objective(config.learner))
    return reply, *trainer.step(reply, 2)


@pytest.fixture(scope="module")
def step() -> Step:
    return a_step()


def taken(folder: Path, step: Step, b: int = 5, **config: Any) -> Samples:
    made = Samples(folder, TrackingConfig(**config), lambda: TokenText(words))
    made.take(b, *step)
    made.close()
    return made


def test_every_number_of_a_token_is_that_of_the_record(tmp_path: Path, step: Step) -> None:
    reply, batch, result = step
    taken(tmp_path / "r", step, rollouts=2)
    written = list(store.read_all(tmp_path / "r"))
    assert len(written) == 2 * 4
    assert len({r.group for r in written}) == 2
    # The batch's rows in their order, found again by what they hold and not by how they were cut.
    spans = np.split(np.arange(len(batch.token_ids)), np.cumsum(batch.lengths.tolist())[:-1])
    rejected = 0
    for rollout in written:
        t = next(t for t in reply.trajectories if (t.id.group, t.id.index) == (rollout.group, rollout.index))
        assert (rollout.digest, rollout.reward, rollout.turns) == (t.digest(), t.reward, t.turns)
        for row, whole in zip(rollout.rows, t.rows, strict=True):
            assert row.token_ids == whole.token_ids.tolist()
            (at,) = [s for s in spans if np.array_equal(batch.token_ids[s].numpy(), whole.token_ids)
                     and np.array_equal(batch.behaviour[s].numpy(), whole.logprobs)]  # fmt: skip
            sampled = whole.mask
            assert np.array_equal(np.float32(row.logprobs), whole.logprobs)
            assert row.versions == whole.versions.tolist()
            for name, recorded in (
                ("learner_logprobs", result.record.proximal),
                ("weights", result.record.weights),
                ("advantages", result.record.advantages),
            ):
                given = np.float32(getattr(row, name))
                assert np.array_equal(given[sampled], recorded[at].numpy()[sampled]), name
                assert not given[~sampled].any()
            carried = sampled & (whole.versions >= 1) & result.record.keep[at].numpy()
            assert row.loss_mask == carried.tolist()
            rejected += int((sampled & (whole.versions >= 1)).sum() - carried.sum())
            assert row.pieces() == [words([id]) for id in row.token_ids]
            assert row.text == words(row.token_ids)
    assert rejected > 0, "the corrections of this test reject some tokens"


def test_a_batch_that_is_redone_gives_the_same_samples_in_the_same_file(tmp_path: Path, step: Step) -> None:
    taken(tmp_path / "r", step)
    (file,) = (tmp_path / "r").iterdir()
    before = file.read_bytes()
    file.write_bytes(b"half a file of a killed learner")
    taken(tmp_path / "r", step)
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["0000-00000005.jsonl"]
    assert file.read_bytes() == before
    assert file.stat().st_mode & 0o077 == 0, "as payloads: only their owner reads them"


def test_none_are_taken_when_none_are_asked_for(tmp_path: Path, step: Step) -> None:
    taken(tmp_path / "r", step, rollouts=0)
    assert not (tmp_path / "r").exists()


def test_while_the_thread_is_behind_batches_are_skipped(tmp_path: Path, step: Step) -> None:
    slow = threading.Event()

    def text() -> TokenText:
        assert slow.wait(20)
        return TokenText(words)

    made = Samples(tmp_path / "r", TrackingConfig(), text)
    for b in range(samples.QUEUED + 3):
        made.take(b, *step)
    assert made.skipped == 3
    slow.set()
    made.close()
    assert len(store.files(tmp_path / "r")) == samples.QUEUED


def test_a_disk_that_refuses_is_one_warning(tmp_path: Path, step: Step, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "r").write_text("a file, where a folder is to be")
    with caplog.at_level(logging.WARNING):
        made = Samples(tmp_path / "r", TrackingConfig(), lambda: TokenText(words))
        for b in range(3):
            made.take(b, *step)
        assert until(lambda: made._queue.empty(), 20)
        (tmp_path / "r").unlink()
        made.take(3, *step)
        made.close()
    assert [record.message.split(":")[0] for record in caplog.records] == ["tracking.rollouts"]
    assert (0, 3) in store.files(tmp_path / "r"), "there is room again"


def test_a_batch_that_the_disk_refuses_is_the_only_one_left_out(
    tmp_path: Path, step: Step, caplog: pytest.LogCaptureFixture
) -> None:
    refused = store.path_of(tmp_path / "r", (0, 5))
    refused.mkdir(parents=True)  # nothing can be renamed to it
    made = Samples(tmp_path / "r", TrackingConfig(), lambda: TokenText(words))
    for b in (5, 6):
        made.take(b, *step)
    made.close()
    left = sorted(path.name for path in (tmp_path / "r").iterdir())
    assert left == [refused.name, "0000-00000006.jsonl"], "a partial file stays on a full disk"
    assert (len(caplog.records), made.errors) == (1, 1)


def test_a_sample_without_text_is_the_only_one_left_out(
    tmp_path: Path, step: Step, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def failing_at_first(ids: Any) -> str:
        calls.append(ids)
        if len(calls) <= 2:
            raise RuntimeError("the tokenizer broke")
        return words(ids)

    made = Samples(tmp_path / "r", TrackingConfig(rollouts=2), lambda: TokenText(failing_at_first))
    for b in (5, 6):
        made.take(b, *step)
    made.close()
    counts = {key: len(store.read(path)) for key, path in store.files(tmp_path / "r").items()}
    assert counts == {(0, 5): 2 * 4 - 2, (0, 6): 2 * 4}
    assert (len(caplog.records), made.errors) == (1, 2)


def test_a_step_whose_samples_cannot_be_taken_goes_on(
    tmp_path: Path, step: Step, caplog: pytest.LogCaptureFixture
) -> None:
    reply, batch, result = step
    made = Samples(tmp_path / "r", TrackingConfig(), lambda: TokenText(words))
    made.take(5, replace(reply, digests=reply.digests[:-1]), batch, result)
    made.take(6, *step)
    made.close()
    assert list(store.files(tmp_path / "r")) == [(0, 6)]
    assert (len(caplog.records), made.errors) == (1, 1)


def test_long_rows_are_cut(tmp_path: Path, step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "ROW_TOKENS", 10)
    taken(tmp_path / "r", step)
    rows = [row for r in store.read_all(tmp_path / "r") for row in r.rows]
    assert {len(row.token_ids) for row in rows} <= {8, 9, 10}
    assert all(len(row.weights) == len(row.loss_mask) == len(row.ends) == len(row.token_ids) for row in rows)
    assert max(row.cut for row in rows) > 0
