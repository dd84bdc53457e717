"""What the learner tells of a batch: of one that it refused for its effective sample size, too."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl.learner.reporting.told import told

FAKE_BATCH: Any = SimpleNamespace(
    behaviour=torch.zeros(4), mask=torch.ones(4, dtype=torch.bool), lengths=torch.tensor([2, 2])
)


def fake_session(max_staleness: int | str) -> Any:
    config = SimpleNamespace(
        buffer=SimpleNamespace(max_staleness=max_staleness), learner=SimpleNamespace(lr=2e-5)
    )  # fmt: skip
    return SimpleNamespace(config=config, waited=lambda now: (2.0, 0.25))


def fake_result(outcome: str, proximal: list[float], lr: float) -> Any:
    return SimpleNamespace(outcome=outcome, record=SimpleNamespace(proximal=torch.tensor(proximal), lr=lr))


def test_a_refused_batch_tells_its_effective_sample_size() -> None:
    """It has no learning rate; that of the configuration keeps `buffer.staleness_lr` in force."""
    said = told(fake_session("auto"), FAKE_BATCH, fake_result("guard", [8.0, 8.0, 0.0, 0.0], 0.0))
    assert said is not None
    assert said.ess == pytest.approx(0.5, abs=1e-3)
    assert (said.waited, said.lr) == (0.25, 2e-5)


@pytest.mark.parametrize(("outcome", "ess"), [("guard", None), ("applied", 0.0)])
def test_no_number_is_told_as_one(outcome: str, ess: float | None) -> None:
    said = told(fake_session("auto"), FAKE_BATCH, fake_result(outcome, [math.nan] * 4, 1e-5))
    assert (None if said is None else said.ess) == ess


def test_under_a_fixed_bound_nothing_is_told() -> None:
    assert told(fake_session(2), FAKE_BATCH, fake_result("applied", [0.0] * 4, 1e-5)) is None
