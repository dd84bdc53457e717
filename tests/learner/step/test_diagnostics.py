"""Effective sample size, mismatch, buckets; the guard; VCPO's scale; A-3PO's proximal."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.learner.step.apply import learning_rate_scale, refuse
from asyncrl.learner.step.diagnostics import (
    effective_sample_size,
    engine_mismatch,
    mismatch,
    off_policy,
    sequence_effective_sample_size,
)
from asyncrl.learner.step.proximal import approximate_proximal
from tests.learner.flat_batches import FLATS


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e6), st.booleans()), min_size=1, max_size=20))
def test_effective_sample_size(pairs: list[tuple[float, bool]]) -> None:
    w = torch.tensor([x for x, _ in pairs], dtype=torch.float64)
    mask = torch.tensor([m for _, m in pairs])
    inside = [x for x, m in pairs if m]
    got = float(effective_sample_size(w, mask))
    if not inside:
        assert got == 1.0
    elif max(inside) < 1e-100:
        assert 0.0 <= got <= 1.0 + 1e-9
    else:
        mean = sum(inside) / len(inside)
        assert got == pytest.approx(1 / (sum((x / mean) ** 2 for x in inside) / len(inside)), rel=1e-9)
        assert 0 < got <= 1 + 1e-9


def test_effective_sample_size_of_extreme_weights_is_finite_in_float32() -> None:
    w = torch.tensor([math.exp(20), 1.0, 1.0, 0.0])
    assert float(effective_sample_size(w, torch.ones(4, dtype=torch.bool))) == pytest.approx(0.25)
    assert float(effective_sample_size(torch.zeros(4), torch.ones(4, dtype=torch.bool))) == 0.0


@pytest.mark.parametrize("case", FLATS)
@pytest.mark.parametrize("cap", [None, 1.5])
def test_sequence_effective_sample_size(cap: float | None, case: str) -> None:
    flat = FLATS[case]
    sums = [sum(flat.floats["proximal"][i] - flat.floats["behaviour"][i] for i in row) for row in flat.rows.rows if row]
    w = [min(math.exp(min(max(s, -20), 20)), math.inf if cap is None else cap) for s in sums]
    expected = sum(w) ** 2 / sum(x * x for x in w) / len(w) if w else 1.0
    got = sequence_effective_sample_size(flat.proximal, flat.behaviour, *flat.layout, cap=cap)
    assert float(got) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("case", FLATS)
def test_mismatch(case: str) -> None:
    flat = FLATS[case]
    x = [flat.floats["proximal"][i] - flat.floats["behaviour"][i] for row in flat.rows.rows for i in row]
    w = [math.exp(min(max(v, -20), 20)) for v in x]
    got = {k: float(v) for k, v in mismatch(flat.proximal, flat.behaviour, flat.mask).items()}
    n = max(len(x), 1)
    assert got["mismatch_kl"] == pytest.approx(sum(a - 1 - b for a, b in zip(w, x, strict=True)) / n, rel=1e-9)
    assert got["mismatch_k1"] == pytest.approx(-sum(x) / n, rel=1e-9)
    assert got["ratio_max"] == pytest.approx(max(w, default=1.0))
    assert got["ratio_min"] == pytest.approx(min(w, default=1.0))
    assert got["ratio_above_2"] == pytest.approx(sum(a > 2 for a in w) / n)
    assert got["ratio_below_half"] == pytest.approx(sum(a < 0.5 for a in w) / n)


def test_buckets_of_staleness() -> None:
    flat = FLATS["seed1"]
    size = flat.mask.numel()
    staleness = torch.tensor([[0, 1, 2, 3, 9, 40][i % 6] for i in range(size)])
    clipped = torch.arange(size) % 2 == 0
    got = off_policy(flat.weights, flat.proximal, flat.behaviour, flat.mask, staleness=staleness, clipped=clipped)
    names = {key.split("/")[0] for key in got if "/" in key}
    assert names == {"staleness_0", "staleness_1", "staleness_2_3", "staleness_8_15", "staleness_16_up"}
    assert sum(int(v) for k, v in got.items() if k.endswith("/tokens")) == int(flat.mask.sum())
    part = flat.mask & ((staleness == 2) | (staleness == 3))
    assert float(got["staleness_2_3/ess"]) == pytest.approx(float(effective_sample_size(flat.weights, part)))
    assert float(got["staleness_2_3/clip_fraction"]) == pytest.approx(float(clipped[part].double().mean()))
    assert {"ess", "mismatch_kl", "ratio_max", "clip_fraction"} <= set(got)


def test_the_engines_mismatch_is_over_tokens_of_the_learners_own_version() -> None:
    behaviour = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0])
    apart = torch.tensor([0.0, 0.01, -0.03, 9.0, 9.0])
    mask = torch.tensor([True, True, True, True, False])
    staleness = torch.tensor([0, 0, 0, 1, 0])
    got = engine_mismatch(behaviour + apart, behaviour, mask, staleness)
    assert float(got["engine_mismatch_mean"]) == pytest.approx(0.04 / 3, rel=1e-4)
    assert float(got["engine_mismatch_max"]) == pytest.approx(0.03, rel=1e-4)
    assert int(got["engine_mismatch_tokens"]) == 3
    assert engine_mismatch(behaviour, behaviour, mask, staleness + 1) == {}


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ({"ess": 0.5, "loss": 0.1, "gradient_norm": 1.0}, None),
        ({"ess": 0.5, "loss": 0.1, "gradient_norm": None}, None),
        ({"ess": 0.05, "loss": 0.1}, "effective sample size 0.05 is below learner.min_ess 0.1"),
        ({"ess": 0.5, "loss": math.nan}, "loss is nan"),
        ({"ess": 0.5, "loss": 0.1, "gradient_norm": math.inf}, "gradient norm is inf"),
        ({"ess": math.nan, "loss": 0.1}, "effective sample size is nan"),
    ],
)
def test_guard(numbers: dict[str, Any], reason: str | None) -> None:
    got = refuse(min_ess=0.1, **numbers)
    assert got is None if reason is None else got is not None and got.startswith(reason)


def test_vcpo_scale() -> None:
    assert learning_rate_scale(1.0) == 1.0
    assert learning_rate_scale(0.25) == pytest.approx(0.5)
    assert learning_rate_scale(0.25, rule="linear") == pytest.approx(0.25)
    assert learning_rate_scale(0.55, base_ess=0.55) == pytest.approx(1.0)
    assert learning_rate_scale(0.9, base_ess=0.55) == 1.0
    assert learning_rate_scale(0.0) == 0.0
    with pytest.raises(ValueError, match="base_ess is 0"):
        learning_rate_scale(0.5, base_ess=0.0)


def test_approximate_proximal() -> None:
    behaviour = torch.tensor([-1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    current = torch.tensor([-3.0] * 4, dtype=torch.float64, requires_grad=True)
    got = approximate_proximal(behaviour, current, torch.tensor([7, 6, 3, -1]), version=7)
    torch.testing.assert_close(got, torch.tensor([-1.0, -1 - 2 * 1 / 2, -1 - 2 * 4 / 5, -1.0], dtype=torch.float64))
    assert not got.requires_grad
