"""KL estimators, their gradients, and the controllers."""

from __future__ import annotations

import math

import pytest
import torch

from asyncrl.learner.objective.kl import KL, AdaptiveKL, FixedKL, penalise_rewards, unbiased

XS = [-25.0, -3.0, -0.4, 0.0, 0.7, 2.0, 25.0]


def value(name: str, x: float) -> float:
    y = min(max(-x, -20.0), 20.0)
    return {"k1": x, "abs": abs(x), "k2": x * x / 2, "k3": min(math.exp(y) - y - 1, 10.0)}[name]


def slope(name: str, x: float) -> float:
    if name == "k3":
        return 0.0 if abs(x) > 20 or value("k3", x) >= 10 else 1 - math.exp(-x)
    return {"k1": 1.0, "abs": float((x > 0) - (x < 0)), "k2": x}[name]


@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3"])
@pytest.mark.parametrize("plus", ["", "+"])
def test_value_and_gradient(name: str, plus: str) -> None:
    reference = torch.tensor([-1.0] * len(XS), dtype=torch.float64, requires_grad=True)
    logprobs = (torch.tensor(XS, dtype=torch.float64) - 1.0).requires_grad_()
    kl = KL[name + plus](logprobs, reference)
    kl.sum().backward()
    expected = torch.tensor([value(name, x) for x in XS], dtype=torch.float64)
    gradient = torch.tensor([x if plus else slope(name, x) for x in XS], dtype=torch.float64)
    torch.testing.assert_close(kl.detach(), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(logprobs.grad, gradient, rtol=1e-9, atol=1e-9)
    assert reference.grad is None


def test_k3_without_a_limit() -> None:
    kl = KL["k3"](torch.tensor([-6.0]), torch.tensor([-1.0]), limit=None)
    torch.testing.assert_close(kl, torch.tensor([math.exp(5) - 6]))
    assert float(KL["k3+"](torch.tensor([-6.0]), torch.tensor([-1.0]), limit=3.0)) == pytest.approx(3.0)


def test_every_estimator_takes_a_limit_on_both_sides() -> None:
    logprobs, reference = torch.tensor([-6.0, -1.0]), torch.tensor([-1.0, -6.0])
    assert KL["k1"](logprobs, reference, limit=2.0).tolist() == [-2.0, 2.0]
    for name in ("abs", "k2", "k3"):
        assert KL[name](logprobs, reference, limit=2.0).tolist() == [2.0, 2.0]


def test_unbiased_estimates_the_current_policys_kl() -> None:
    """Over all outcomes, weighted by the policy that sampled, r * k1 sums to KL(current || reference), and so does its
    gradient."""
    logits = torch.tensor([0.3, -1.0, 0.2, 2.0], dtype=torch.float64, requires_grad=True)
    sampled = torch.log_softmax(torch.tensor([0.0, 0.5, -1.0, 1.0], dtype=torch.float64), 0)
    reference = torch.log_softmax(torch.tensor([1.0, 0.0, 0.0, 0.3], dtype=torch.float64), 0)
    current = torch.log_softmax(logits, 0)
    estimate = (sampled.exp() * unbiased(KL["k1"](current, reference), current, sampled)).sum()
    exact = (current.exp() * (current - reference)).sum()
    torch.testing.assert_close(estimate, exact)
    ours, truth = torch.autograd.grad(estimate, logits, retain_graph=True)[0], torch.autograd.grad(exact, logits)[0]
    torch.testing.assert_close(ours, truth)


def test_kl_in_the_reward() -> None:
    rewards, kl = torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.5, 2.0, torch.nan])
    got = penalise_rewards(rewards, kl, torch.tensor([True, True, False]), 0.1)
    torch.testing.assert_close(got, torch.tensor([-0.05, 0.8, 0.0]))


def test_controllers() -> None:
    fixed = FixedKL(0.3)
    fixed.update(5.0, 100)
    assert fixed.value == 0.3
    adaptive = AdaptiveKL(0.3, target=0.1, horizon=1000)
    adaptive.update(0.11, 100)
    assert adaptive.value == pytest.approx(0.3 * (1 + 0.1 * 0.1))
    adaptive.value = 0.3
    adaptive.update(10.0, 100)
    assert adaptive.value == pytest.approx(0.3 * (1 + 0.2 * 0.1))
    adaptive.value = 0.3
    adaptive.update(0.0, 100)
    assert adaptive.value == pytest.approx(0.3 * (1 - 0.2 * 0.1))
    with pytest.raises(ValueError, match="target 0"):
        AdaptiveKL(0.3, target=0.0)
