"""Divergences over a vocabulary, in values and gradients, against slow loops; chunked against whole."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from asyncrl.learner.backends import logprobs as logprobs_module
from asyncrl.learner.backends.comparison import ROWS, TeacherStates, compared
from asyncrl.learner.backends.logprobs import selected_logprobs
from asyncrl.learner.budget.counting import Counter
from asyncrl.learner.distillation.divergence import Comparison, Divergence
from tests.learner.distillation import slow_divergences as slow

KINDS = [("reverse_kl", 0.5), ("forward_kl", 0.5), ("jsd", 0.5), ("jsd", 0.1), ("jsd", 0.9)]
SUPPORTS = [(0, "teacher"), (3, "teacher"), (3, "student")]
WORDS, N = 37, 5


def drawn(n: int = N, words: int = WORDS, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, TeacherStates]:
    g = torch.Generator().manual_seed(n)
    hidden, weight = (torch.randn(k, 6, generator=g, dtype=torch.float64) for k in (n, words))
    teacher = [torch.randn(k, 4, generator=g, dtype=torch.float64).to(dtype) for k in (n, words)]
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), TeacherStates(*teacher)


def targets(n: int = N, words: int = WORDS) -> Tensor:
    return torch.randint(0, words, (n,), generator=torch.Generator().manual_seed(3))


def as_logits(hidden: Tensor, weight: Tensor, temperature: float) -> list[list[float]]:
    return (hidden.detach().double() @ weight.detach().double().t() / temperature).tolist()


@pytest.mark.parametrize(("k", "words_of"), SUPPORTS)
@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_those_of_slow_loops(
    kind: Any, beta: float, k: int, words_of: Any, temperature: float
) -> None:
    hidden, weight, teacher = drawn()
    upstream = torch.randn(N, generator=torch.Generator().manual_seed(5)).double()
    how = Comparison(Divergence(kind, beta), k, words_of)
    found = compared(hidden, weight, targets(), teacher, how, temperature=temperature, chunk=4)
    (found[0] * upstream).sum().backward()

    students, teachers = as_logits(hidden, weight, temperature), as_logits(teacher.hidden, teacher.weight, temperature)
    by_logits = []
    for i, (s, t) in enumerate(zip(students, teachers, strict=True)):

        def of(logits: list[float], s: list[float] = s, t: list[float] = t) -> float:
            if k == 0:
                return slow.divergence(logits, t, kind, beta)
            likely = t if words_of == "teacher" else s  # chosen at the place itself: the choice has no gradient
            kept = sorted(range(WORDS), key=lambda v: -likely[v])[:k]
            return slow.coarse(logits, t, kind, beta, kept)

        assert float(found[0, i].detach()) == pytest.approx(of(s), abs=1e-9)
        by_logits.append([float(upstream[i]) * x / temperature for x in slow.gradient(of, s)])
    slope = torch.tensor(by_logits, dtype=torch.float64)
    torch.testing.assert_close(hidden.grad, slope @ weight.detach(), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(weight.grad, slope.t() @ hidden.detach(), atol=1e-9, rtol=1e-9)


def test_what_is_seen_of_each_token() -> None:
    hidden, weight, _ = drawn(24)
    noise = torch.randn(24, 6, generator=torch.Generator().manual_seed(1)).double()
    teacher = TeacherStates(hidden.detach() + 0.8 * noise, weight.detach())
    found = dict(zip(ROWS, compared(hidden, weight, targets(24), teacher, Comparison()).detach().tolist(), strict=True))
    students, teachers = as_logits(hidden, weight, 1.0), as_logits(teacher.hidden, teacher.weight, 1.0)
    for i, (s, t) in enumerate(zip(students, teachers, strict=True)):
        q = slow.softmax(t)
        assert found["logprobs"][i] == pytest.approx(slow.math.log(q[int(targets(24)[i])]), abs=1e-9)
        assert found["entropy"][i] == pytest.approx(-sum(x * slow.math.log(x) for x in q), abs=1e-9)
        assert found["agrees"][i] == float(s.index(max(s)) == t.index(max(t)))
        assert found["reverse_kl"][i] == pytest.approx(slow.divergence(s, t, "reverse_kl"), abs=1e-9)
        assert found["forward_kl"][i] == pytest.approx(slow.divergence(s, t, "forward_kl"), abs=1e-9)
    assert 0 < sum(found["agrees"]) < 24, "the two agree somewhere and differ elsewhere, or the test sees nothing"


@pytest.mark.parametrize("k", [0, 5])
@pytest.mark.parametrize(("kind", "beta"), KINDS[:3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_chunks_of_tokens_and_slices_of_the_vocabulary_equal_the_whole(
    kind: Any, beta: float, k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for chunk in (None, 4):
        if chunk:  # 37 words: slices of 8 and a rest of 5; 21 tokens: chunks of 4, and of 6 in the backward pass
            monkeypatch.setattr(logprobs_module, "SLICED", 16)
            monkeypatch.setattr(logprobs_module, "SLICE", 8)
            monkeypatch.setattr(logprobs_module, "SLICE_LOGITS", 48)
        hidden, weight, teacher = drawn(21, dtype=dtype)
        found = compared(
            hidden, weight, targets(21), teacher, Comparison(Divergence(kind, beta), k), temperature=0.7, chunk=chunk
        )
        (found[0] * torch.linspace(-1, 2, 21, dtype=dtype)).sum().backward()
        results.append((found, hidden.grad, weight.grad))
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    for whole, cut in zip(*results, strict=True):
        torch.testing.assert_close(cut, whole, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_the_k_most_likely_words_give_a_lower_bound_that_grows_to_the_whole(kind: Any, beta: float) -> None:
    hidden, weight, teacher = drawn()
    of_k = [
        compared(hidden, weight, targets(), teacher, Comparison(Divergence(kind, beta), k))[0].detach()
        for k in (1, 2, 8, 32, WORDS - 1, WORDS, 0)
    ]
    assert bool((of_k[0] >= -1e-12).all())
    for fewer, more in itertools.pairwise(of_k):
        assert bool((fewer <= more + 1e-12).all())
    torch.testing.assert_close(of_k[-2], of_k[-1], atol=1e-12, rtol=0)
    assert float((of_k[-1] - of_k[0]).min()) > 1e-3, "a bound that is the value would show nothing"


def test_a_smaller_head_of_either_is_compared_on_the_words_that_both_have() -> None:
    hidden, weight, teacher = drawn()
    plain = compared(
        hidden, weight, targets(words=30), TeacherStates(teacher.hidden, teacher.weight[:30]), Comparison()
    )
    smaller = compared(hidden, weight[:30], targets(words=30), teacher, Comparison())
    torch.testing.assert_close(plain, smaller, atol=1e-12, rtol=0)
    plain[0].sum().backward()
    assert not weight.grad[30:].any()
    assert weight.grad[:30].any()
    foreign = compared(
        hidden, weight, torch.full((N,), 33), TeacherStates(teacher.hidden, teacher.weight[:30]), Comparison()
    )
    assert bool((foreign[1] == -torch.inf).all()), "a token that the teacher has no word for"


def test_the_same_weights_differ_by_nothing_and_have_no_gradient() -> None:
    hidden, weight, _ = drawn()
    found = compared(hidden, weight, targets(), TeacherStates(hidden.detach(), weight.detach()), Comparison())
    found[0].sum().backward()
    torch.testing.assert_close(found[0], torch.zeros_like(found[0]), atol=1e-14, rtol=0)
    torch.testing.assert_close(hidden.grad, torch.zeros_like(hidden), atol=1e-14, rtol=0)
    assert bool(found[3].all())
    plain, entropy = selected_logprobs(hidden, weight, targets())
    torch.testing.assert_close(found[1], plain, atol=1e-12, rtol=0)
    torch.testing.assert_close(found[2], entropy, atol=1e-12, rtol=0)


def test_memory_does_not_grow_with_the_tokens() -> None:
    """At 20,000 words, which are taken in slices: a few chunks of logits, and the gradient of the head."""

    def peak(n: int) -> int:
        with FakeTensorMode(), Counter() as counted:
            hidden, weight = torch.zeros(n, 8).requires_grad_(), torch.zeros(20_000, 8).requires_grad_()
            states = TeacherStates(torch.zeros(n, 8), torch.zeros(20_000, 8))
            compared(hidden, weight, torch.zeros(n, dtype=torch.long), states, Comparison())[0].sum().backward()
        return counted.peak

    few, many = peak(16 * 1024), peak(32 * 1024)
    assert many < 1.05 * few
    assert many < 8 * (1 << 27) * 4, "eight chunks of logits"


def test_a_greedy_temperature_is_refused() -> None:
    hidden, weight, teacher = drawn()
    with pytest.raises(ValueError, match="temperature is 0"):
        compared(hidden, weight, targets(), teacher, Comparison(), temperature=0.0)
