"""Divergences again, slowly: float64, loops over tokens and words, gradients by hand, nothing shared with asyncrl.

TRL's GKD (trl/experimental/gkd, `generalized_jsd_loss`; 2306.13649): beta 0 is KL(teacher || student), 1 is
KL(student || teacher), between them beta KL(T || M) + (1 - beta) KL(S || M) with M = (1 - beta) S + beta T.
"""

from __future__ import annotations

import math


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    powers = [math.exp(x - top) for x in logits]
    return [x / sum(powers) for x in powers]


def kl(a: list[float], b: list[float]) -> float:
    return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x > 0)


def generalized_jsd(student: list[float], teacher: list[float], beta: float) -> float:
    """TRL's loss at one place, from logits."""
    s, t = softmax(student), softmax(teacher)
    if beta == 0:
        return kl(t, s)
    if beta == 1:
        return kl(s, t)
    m = [(1 - beta) * x + beta * y for x, y in zip(s, t, strict=True)]
    return beta * kl(t, m) + (1 - beta) * kl(s, m)


BETA = {"forward_kl": 0.0, "reverse_kl": 1.0}


def divergence(student: list[float], teacher: list[float], kind: str, beta: float = 0.5) -> float:
    return generalized_jsd(student, teacher, BETA.get(kind, beta))


def coarse(student: list[float], teacher: list[float], kind: str, beta: float, kept: list[int]) -> float:
    """The same between distributions that tell the `kept` words apart, and take all others for one."""
    s, t = softmax(student), softmax(teacher)
    rest = [v for v in range(len(s)) if v not in kept]
    merged = [[math.log(x[v]) for v in kept] + [math.log(sum(x[v] for v in rest))] for x in (s, t)]
    return divergence(*merged, kind, beta)


def gradient(function, logits: list[float], step: float = 1e-4) -> list[float]:
    """Of `function` by each logit, by central differences of sixth order."""
    found = []
    for v in range(len(logits)):

        def at(n: int, v: int = v) -> float:
            return function([x + n * step * (i == v) for i, x in enumerate(logits)])

        found.append((45 * (at(1) - at(-1)) - 9 * (at(2) - at(-2)) + (at(3) - at(-3))) / (60 * step))
    return found
