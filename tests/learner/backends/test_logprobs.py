from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncrl.learner.backends import logprobs as logprobs_module
from asyncrl.learner.backends.logprobs import chunk_of, selected_logprobs
from asyncrl.learner.budget.counting import Counter


def naive(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(hidden @ weight.t() / temperature, dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


def inputs(n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(n)
    hidden = torch.randn(n, 16, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(37, 16, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, 37, (n,), generator=g)


@pytest.mark.parametrize("sliced", [False, True], ids=["whole", "sliced"])
@pytest.mark.parametrize("chunk", [1, 4, 7, 100, None])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("entropy", [0.0, 0.3])
def test_values_and_gradients_equal_the_naive_ones(
    chunk: int | None, temperature: float, entropy: float, sliced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sliced:  # 37 words: slices of 8 and a rest of 5; 21 tokens: chunks of 6
        monkeypatch.setattr(logprobs_module, "SLICED", 16)
        monkeypatch.setattr(logprobs_module, "SLICE", 8)
        monkeypatch.setattr(logprobs_module, "SLICE_LOGITS", 48)
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


@pytest.mark.parametrize("chunk", [4, None])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_without_entropy_logprobs_and_gradients_are_the_same(chunk: int | None, temperature: float) -> None:
    found = []
    for entropy in (True, False):
        hidden, weight, targets = inputs(21, torch.float32)
        logprobs, of_each = selected_logprobs(hidden, weight, targets, temperature, chunk, entropy=entropy)
        assert (of_each is None) == (not entropy)
        logprobs.square().sum().backward()
        found.append((logprobs, hidden.grad, weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_gradient_of_a_float32_head_is_not_rounded_to_the_states_dtype() -> None:
    """Of bfloat16 states: what the products round is one thing, a rounding of the sum of all chunks another."""
    hidden, weight, targets = inputs(64, torch.float32)
    half = hidden.detach().bfloat16()
    selected_logprobs(half, weight, targets, chunk=8)[0].sum().backward()
    assert weight.grad is not None
    assert not torch.equal(weight.grad, weight.grad.bfloat16().float())


class Traffic(TorchDispatchMode):
    """Bytes that operations read and write, views aside, and the largest float32 tensor of a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.float32: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.is_view or "empty" in func.name() or func.namespace == "prim":
            return made
        written = [x for x in tree_leaves(made) if isinstance(x, Tensor)]
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)] + written
        self.bytes += sum(x.numel() * x.element_size() for x in tensors)
        self.float32.update(tuple(x.shape) for x in written if x.dtype == torch.float32)
        return made


QWEN3 = (151936, 1024)


def traffic(tokens: int, weight_dtype: torch.dtype, **asked: Any) -> tuple[float, int, set[tuple[int, ...]]]:
    """Bytes a logit, peak bytes, and shapes of float32 results, of a pass over a head as Qwen3-0.6B has it."""
    vocabulary, width = QWEN3
    with FakeTensorMode():
        hidden = torch.empty(tokens, width, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(vocabulary, width, dtype=weight_dtype, requires_grad=True)
        targets = torch.empty(tokens, dtype=torch.long)
        with Counter([hidden, weight]) as counted, Traffic() as moved:
            selected_logprobs(hidden, weight, targets, **asked)[0].sum().backward()
    return moved.bytes / (tokens * vocabulary), counted.peak, moved.float32


@pytest.mark.system
def test_a_large_vocabulary_moves_few_bytes_a_logit() -> None:
    """With chunks of 512 tokens, entropy always, a division by 1 and a float32 head for each chunk these were 175."""
    with_entropy, peak, made = traffic(16384, torch.bfloat16)
    without, _, _ = traffic(16384, torch.bfloat16, entropy=False)
    assert with_entropy < 110
    assert without < with_entropy - 20
    assert QWEN3 not in made, "no float32 gradient of the whole head while chunks are computed"
    assert peak < 1.2 * 2**30
    assert traffic(16384, torch.bfloat16, temperature=0.7)[0] > with_entropy + 10, "a temperature of 1 costs nothing"


def test_chunks_grow_with_the_memory_of_a_gpu_and_fit_a_cache_of_a_cpu() -> None:
    assert chunk_of(40) == (1 << 20) // 40
    assert chunk_of(8192) == 512
    assert [chunk_of(n) for n in (32000, 151936, 262144)] == [4096, 768, 512]
