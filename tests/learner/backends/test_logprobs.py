from __future__ import annotations

import pytest
import torch
from torch import Tensor

from asyncrl.learner.backends.logprobs import selected_logprobs
from asyncrl.learner.budget.counting import Counter


def naive(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(hidden @ weight.t() / temperature, dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


def inputs(n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(n)
    hidden = torch.randn(n, 16, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(37, 16, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, 37, (n,), generator=g)


@pytest.mark.parametrize("chunk", [1, 4, 7, 100, None])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("entropy", [0.0, 0.3])
def test_values_and_gradients_equal_the_naive_ones(chunk: int | None, temperature: float, entropy: float) -> None:
    upstream = torch.randn(21, generator=torch.Generator().manual_seed(5)).double()
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        results = []
        for function in (naive, lambda *a: selected_logprobs(*a, chunk=chunk)):
            hidden, weight, targets = inputs(21, dtype)
            logprobs, h = function(hidden, weight, targets, temperature)
            loss = (logprobs * upstream.to(dtype)).sum()
            if entropy:
                loss = loss + entropy * (h * upstream.to(dtype)).sum()
            loss.backward()
            results.append((logprobs, h, hidden.grad, weight.grad))
        for expected, got in zip(*results, strict=True):
            assert expected is not None
            torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


def test_float32_is_exact_to_a_millionth() -> None:
    hidden, weight, targets = inputs(64, torch.float32)
    hidden, weight = hidden.detach() / 4, weight.detach()
    exact = naive(hidden.double(), weight.double(), targets, 1.0)[0]
    got = selected_logprobs(hidden, weight, targets, chunk=10)[0]
    assert (got.double() - exact).abs().max() < 1e-6


@pytest.mark.parametrize("head_trains", [True, False])
def test_peak_memory_does_not_grow_with_tokens_times_vocabulary(head_trains: bool) -> None:
    vocabulary, width, chunk = 2000, 16, 128

    def peak(tokens: int) -> int:
        hidden = torch.randn(tokens, width, requires_grad=True)
        weight = torch.randn(vocabulary, width, requires_grad=head_trains)
        targets = torch.randint(0, vocabulary, (tokens,))
        with Counter() as counted:
            logprobs, h = selected_logprobs(hidden, weight, targets, chunk=chunk)
            (logprobs.sum() + h.sum()).backward()
        assert (weight.grad is not None) == head_trains
        return counted.peak

    few, many = peak(512), peak(4096)
    assert many - few < 2 * (4096 - 512) * (width + 8) * 4, "what is kept of a token: its state, and a few numbers"
    assert many < 7 * chunk * vocabulary * 4
    with Counter() as counted:
        naive(
            *(x.detach() for x in (torch.randn(4096, width), torch.randn(vocabulary, width))),
            torch.zeros(4096).long(),
            1.0,
        )
    assert counted.peak > 4096 * vocabulary * 4, "the count sees all logits where they are made"


def test_bfloat16_gives_float32_logprobs() -> None:
    hidden, weight, targets = inputs(8, torch.bfloat16)
    logprobs, h = selected_logprobs(hidden, weight, targets)
    assert logprobs.dtype == h.dtype == torch.float32


def test_no_tokens() -> None:
    hidden, weight, targets = inputs(0, torch.float32)
    logprobs, _ = selected_logprobs(hidden, weight, targets)
    logprobs.sum().backward()
    assert logprobs.shape == (0,)
    assert weight.grad is not None
    assert weight.grad.abs().sum() == 0


def test_greedy_has_no_logprob() -> None:
    with pytest.raises(ValueError, match="temperature is 0"):
        selected_logprobs(*inputs(3, torch.float32), temperature=0.0)
