from __future__ import annotations

import math

import pytest

from asyncrl.learner.step.apply import learning_rate
from asyncrl.learner.step.train_step import train_step
from tests.learner.backends.hf.test_torch import TorchBackend
from tests.learner.step.test_train_step import Objective, a_batch
from tests.learner.tiny import tiny_config, tiny_model


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0] + [0.5 * (1 + math.cos(math.pi * x / 4)) for x in range(4)]),
    ],
)
def test_warm_up_then_the_schedule(schedule: str, expected: list[float]) -> None:
    found = [learning_rate(u, 6, peak=1.0, warmup=2, schedule=schedule) for u in range(6)]  # type: ignore[arg-type]
    assert found == pytest.approx(expected)


def test_every_update_of_a_step_has_its_own_rate_and_resuming_needs_no_state() -> None:
    config = tiny_config(steps=4, minibatches=2, warmup_steps=4, schedule="linear", lr=1e-3)
    backend, objective = TorchBackend(config, tiny_model(), device="cpu"), Objective(config.learner)
    used: list[float] = []
    apply = backend.apply
    backend.apply = lambda lr: (used.append(lr), apply(lr))[1]  # type: ignore[method-assign]
    for version in (0, 2):
        train_step(backend, objective, a_batch(version), config.learner, version=version)
    assert used == pytest.approx([0.25e-3, 0.5e-3, 1e-3, 0.75e-3])
