"""Training steps without a gradient: applied, counted, and without any other effect."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from asyncrl.learner.backends.hf.torch import TorchBackend
from asyncrl.learner.batch import Batch, flatten
from asyncrl.learner.objective.objective import Objective
from asyncrl.learner.reporting.metrics import step_metrics
from asyncrl.learner.step.apply import refuse
from asyncrl.learner.step.companions import companions
from asyncrl.learner.step.train_step import StepResult, train_step
from asyncrl.tracking.series import check
from tests.learner.step.test_train_step import a_batch, differ, episodes, state
from tests.learner.tiny import tiny_config, tiny_model


def rejected(seed: int) -> Batch:
    """Behaviour logprobs that differ so much that every token is rejected."""
    batch = a_batch(seed)
    return dataclasses.replace(batch, behaviour=batch.behaviour - 15.0 * batch.mask)


def silent(seed: int) -> Batch:
    """All over age."""
    return flatten(episodes(seed), range(4), mask_before=99)


def solved(seed: int) -> Batch:
    """All rewards alike."""
    return flatten([dataclasses.replace(t, reward=1.0) for t in episodes(seed)], range(4))


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("empty", [rejected, silent, solved])
def test_a_step_without_gradient_is_applied_and_changes_neither_weights_nor_optimizer_nor_schedule(
    empty: Any, minibatches: int
) -> None:
    config = tiny_config(
        min_ess=0.05, weight_decay=0.1, steps=6, warmup_steps=2, schedule="linear", minibatches=minibatches,
        corrections=({"name": "mis", "low": 0.5, "high": 2.0},), loss="reinforce",
    )  # fmt: skip
    learner, objective = config.learner, Objective(config.learner)

    def after(batches: list[Batch]) -> tuple[dict[str, Tensor], list[StepResult]]:
        backend, kept = TorchBackend(config, tiny_model(), device="cpu"), companions(config, None)  # type: ignore[arg-type]
        results = [
            train_step(backend, objective, batch, learner, version=v, companions=kept)
            for v, batch in enumerate(batches)
        ]
        return state(backend), results

    plain, _ = after([a_batch(0), a_batch(1)])
    among, results = after([a_batch(0), empty(5), empty(6), a_batch(1)])
    assert [result.outcome for result in results] == ["applied"] * 4, [result.why for result in results]
    assert [result.record.steps_without_gradient for result in results] == [0, 1, 2, 2]
    assert results[1].record.grad_norms == [0.0] * minibatches
    assert differ(among, plain) == 0.0
    values = step_metrics(objective, empty(5), episodes(), results[1], version=1, success="success")
    check(values)
    assert values["weights/without_gradient"] == 1
    assert values["weights/lr"] == 0


def test_what_the_schedule_has_passed_is_in_the_checkpoint(tmp_path: Path) -> None:
    config = tiny_config(steps=6, warmup_steps=3)
    backend, kept = TorchBackend(config, tiny_model(), device="cpu"), companions(tiny_config(), None)  # type: ignore[arg-type]
    objective = Objective(config.learner)
    for version in range(2):
        train_step(backend, objective, silent(version), config.learner, version=version, companions=kept)
    kept.snapshot()(tmp_path)
    resumed = companions(config, None)  # type: ignore[arg-type]
    resumed.load(tmp_path)
    result = train_step(backend, objective, a_batch(), config.learner, version=2, companions=resumed)
    assert result.record.lr == pytest.approx(config.learner.lr / 3), "the first step of the warm-up"
    (tmp_path / "schedule.json").unlink()
    resumed.load(tmp_path)
    assert resumed.schedule.place(2) == 2, "a checkpoint from before the first such step has no such file"


def test_a_loss_that_is_no_number_is_refused_although_it_has_no_gradient() -> None:
    assert refuse(ess=0.0, min_ess=0.5, loss=0.0, gradient_norm=0.0) is None
    assert "loss is nan" in str(refuse(ess=1.0, min_ess=0.5, loss=float("nan"), gradient_norm=0.0))
    assert refuse(ess=0.0, min_ess=0.5, loss=0.0, gradient_norm=1e-30) is not None


def test_a_batch_without_any_loss_changes_nothing_but_counts() -> None:
    config = tiny_config()
    backend, objective = TorchBackend(config, tiny_model(), device="cpu"), Objective(config.learner)
    before = {n: t.clone() for n, t in backend.weights()}
    batch = silent(0)
    result = train_step(backend, objective, batch, config.learner, version=99)
    assert result.outcome == "applied"
    assert result.record.loss == 0.0
    assert differ(dict(backend.weights()), before) == 0.0
    check(step_metrics(objective, batch, episodes(), result, version=99, success="success"))
