"""The critic's loss against a loop."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from asyncrl.learner.losses.value import ValueInputs, value_loss
from tests.learner import reference
from tests.learner.flat_batches import FLATS


@pytest.mark.parametrize("case", FLATS)
@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("huber", [None, 0.5])
def test_value_and_gradient(huber: float | None, clip: float | None, case: str) -> None:
    flat = FLATS[case]
    values = flat.values.requires_grad_()
    old, returns = flat.values.detach() + flat.weights - 1, flat.advantages
    got = value_loss(ValueInputs(values, old, returns, flat.mask), clip, huber_delta=huber)
    got.backward()

    def distance(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        d = (x - target).abs()
        return d * d if huber is None or float(d) <= huber else 2 * huber * (d - huber / 2)

    slow = torch.tensor(flat.floats["values"], dtype=torch.float64, requires_grad=True)
    tokens = [i for row in flat.rows.rows for i in row]
    total = torch.zeros((), dtype=torch.float64) + 0 * slow.sum()
    for i in tokens:
        here = distance(slow[i], returns[i])
        if clip is not None:
            kept = slow[i].clamp(float(old[i]) - clip, float(old[i]) + clip)
            here = max(here, distance(kept, returns[i]), key=lambda x: x.item())
        total = total + 0.5 * here / len(tokens)
    total.backward()
    torch.testing.assert_close(got, total, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(values.grad, slow.grad, rtol=1e-9, atol=1e-9)


def test_by_row_and_cut() -> None:
    flat = FLATS["seed1"]
    inputs = ValueInputs(
        flat.values,
        flat.values,
        flat.advantages,
        flat.mask,
        lengths=flat.lengths,
        aggregation="seq_mean_token_mean",
    )
    got = value_loss(inputs, scale=1.0)
    squares = [(v - a) ** 2 for v, a in zip(flat.floats["values"], flat.floats["advantages"], strict=True)]
    assert float(got) == pytest.approx(reference.aggregate(flat.rows, "seq_mean_token_mean", squares))
    whole_inputs = ValueInputs(flat.values, flat.values, flat.advantages, flat.mask)
    half = value_loss(dataclasses.replace(whole_inputs, denominator=2.0 * int(flat.mask.sum())))
    whole = value_loss(whole_inputs)
    assert float(half) == pytest.approx(float(whole) / 2)


def test_errors() -> None:
    flat = FLATS["seed1"]
    inputs = ValueInputs(flat.values, flat.values, flat.values, flat.mask)
    with pytest.raises(TypeError, match="lengths"):
        value_loss(dataclasses.replace(inputs, aggregation="seq_mean_token_sum"))
    with pytest.raises(ValueError, match=r"clip is -0\.1"):
        value_loss(inputs, clip=-0.1)
