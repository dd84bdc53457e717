"""Estimates and advantages from the sampled token: in expectation over it they are the divergence and its gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from asyncrl.learner.distillation.divergence import Divergence
from tests.learner.distillation import slow_divergences as slow

KINDS = [("reverse_kl", 0.5), ("forward_kl", 0.5), ("jsd", 0.5), ("jsd", 0.2)]
STUDENT, TEACHER = [0.3, -1.2, 2.0, 0.0], [1.1, 0.4, -0.7, 0.2]


def ratio(v: int) -> float:
    """log(q / p) of word v."""
    return math.log(slow.softmax(TEACHER)[v] / slow.softmax(STUDENT)[v])


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_the_estimate_is_the_divergence_in_expectation(kind: Any, beta: float) -> None:
    p, divergence = slow.softmax(STUDENT), Divergence(kind, beta)
    expected = sum(p[v] * float(divergence.estimate(torch.tensor(ratio(v), dtype=torch.float64))) for v in range(4))
    assert expected == pytest.approx(slow.divergence(STUDENT, TEACHER, kind, beta), abs=1e-9)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_the_advantage_gives_the_gradient_in_expectation(kind: Any, beta: float) -> None:
    p, divergence = slow.softmax(STUDENT), Divergence(kind, beta)
    advantages = [float(divergence.advantage(torch.tensor(ratio(v), dtype=torch.float64))) for v in range(4)]
    # d log p_v / d logit_u is 1 where u is v, minus p_u.
    found = [-sum(p[v] * advantages[v] * ((u == v) - p[u]) for v in range(4)) for u in range(4)]
    expected = slow.gradient(lambda x: slow.divergence(x, TEACHER, kind, beta), STUDENT)
    assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_where_both_agree_there_is_nothing_to_learn(kind: Any, beta: float) -> None:
    zero = torch.zeros((), dtype=torch.float64)
    divergence = Divergence(kind, beta)
    assert float(divergence.advantage(zero)) == pytest.approx(0.0, abs=1e-15)
    assert float(divergence.estimate(zero)) == pytest.approx(0.0, abs=1e-15)


def test_the_advantage_of_published_on_policy_distillation() -> None:
    """Thinking Machines, 'On-policy distillation': advantage = -(student's logprob - teacher's); slime and ROLL too."""
    student, teacher = torch.tensor([-1.5, -0.2]), torch.tensor([-0.5, -3.0])
    assert torch.equal(Divergence("reverse_kl").advantage(teacher - student), -(student - teacher))


def test_the_mixture_tends_to_nothing_at_its_ends_as_in_trl() -> None:
    for beta in (1e-9, 1 - 1e-9):
        terms = Divergence("jsd", beta).terms(*(torch.tensor(x).double().log_softmax(0) for x in (STUDENT, TEACHER)))
        assert float(terms.sum()) == pytest.approx(0.0, abs=1e-7)
