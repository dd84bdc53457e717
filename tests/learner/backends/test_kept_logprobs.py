"""Scores over kept ids: values and gradients of a slow loop over tokens, in every cut of tokens and vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from asyncrl.learner.backends import logprobs as logprobs_module
from asyncrl.learner.backends.logprobs import outside, selected_logprobs, sum_of_squared_probabilities

VOCABULARY, WIDTH, TOKENS = 37, 16, 21


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, WIDTH, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, VOCABULARY, (TOKENS,), generator=g)


def sets(targets: Tensor) -> list[list[int]]:
    """Of every token; every fourth has none, the first its own id alone, the second all."""
    g = torch.Generator().manual_seed(4)
    found = []
    for t, target in enumerate(targets.tolist()):
        size = 0 if t == 0 else VOCABULARY if t == 1 else 1 + t % 9
        others = torch.randperm(VOCABULARY, generator=g)[:size].tolist()
        found.append([] if t % 4 == 3 else sorted({target, *others}))
    return found


def padded(sets: list[list[int]]) -> Tensor:
    widest = max(map(len, sets))
    return torch.tensor([ids + [-1] * (widest - len(ids)) for ids in sets], dtype=torch.int32)


def slow(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, kept: list[list[int]]) -> list[Tensor]:
    """Logprobs, entropies and sums of squares, token by token from the definition."""
    found: list[list[Tensor]] = [[], [], []]
    for h, target, ids in zip(hidden, targets.tolist(), kept, strict=True):
        among = ids or list(range(VOCABULARY))
        logits = torch.stack([h @ weight[i] / temperature for i in among])
        log_z = torch.logsumexp(logits, 0)
        p = (logits - log_z).exp()
        found[0].append(logits[among.index(target)] - log_z)
        found[1].append(-sum(x * (z - log_z) for x, z in zip(p, logits, strict=True)))  # type: ignore[arg-type]
        found[2].append((p * p).sum())
    return [torch.stack(x) for x in found]


@pytest.mark.parametrize("sliced", [False, True], ids=["whole", "sliced"])
@pytest.mark.parametrize("chunk", [1, 7, None])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy", [0.0, 0.3])
def test_values_and_gradients_are_those_of_the_definition(
    chunk: int | None, temperature: float, entropy: float, sliced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sliced:  # 37 words: slices of 8 and a rest of 5; 21 tokens: chunks of 6
        monkeypatch.setattr(logprobs_module, "SLICED", 16)
        monkeypatch.setattr(logprobs_module, "SLICE", 8)
        monkeypatch.setattr(logprobs_module, "SLICE_LOGITS", 48)
    upstream = torch.randn(TOKENS, generator=torch.Generator().manual_seed(5)).double()
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        hidden, weight, targets = inputs(dtype)
        kept = sets(targets)
        results = []
        for fast in (False, True):
            hidden, weight, targets = inputs(dtype)
            if fast:
                logprobs, h = selected_logprobs(hidden, weight, targets, temperature, chunk, kept=padded(kept))
                squares = sum_of_squared_probabilities(hidden, weight, temperature, chunk, kept=padded(kept))
            else:
                logprobs, h, squares = slow(hidden, weight, targets, temperature, kept)
            assert h is not None
            loss = (logprobs * upstream.to(dtype)).sum()
            if entropy:
                loss = loss + entropy * (h * upstream.to(dtype)).sum()
            loss.backward()
            results.append((logprobs, h, squares, hidden.grad, weight.grad))
        for expected, got in zip(*results, strict=True):
            assert expected is not None
            torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


def test_a_token_that_could_only_be_itself_has_logprob_0_and_no_gradient() -> None:
    hidden, weight, targets = inputs(torch.float32)
    logprobs, h = selected_logprobs(hidden, weight, targets, kept=targets[:, None].int())
    assert logprobs.tolist() == [0.0] * TOKENS
    assert h is not None
    (logprobs.sum() + h.sum()).backward()
    assert hidden.grad is not None
    assert hidden.grad.abs().max() == 0


def test_the_whole_vocabulary_kept_is_no_truncation() -> None:
    hidden, weight, targets = inputs(torch.float32)
    everything = torch.arange(VOCABULARY, dtype=torch.int32).expand(TOKENS, -1)
    without = torch.full((TOKENS, 1), -1, dtype=torch.int32)
    plain = selected_logprobs(hidden, weight, targets)
    for kept in (everything, without):
        for expected, got in zip(plain, selected_logprobs(hidden, weight, targets, kept=kept), strict=True):
            assert torch.equal(got, expected), "by no bit"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_nan_where_what_is_not_kept_is_most_probable(dtype: torch.dtype) -> None:
    hidden, weight = torch.ones(2, 4, dtype=dtype).mul_(50).requires_grad_(), torch.eye(6, 4, dtype=dtype).mul_(50)
    weight = weight.requires_grad_()
    kept = torch.tensor([[4, 5], [5, -1]], dtype=torch.int32)
    logprobs, h = selected_logprobs(hidden, weight, torch.tensor([4, 5]), kept=kept)
    assert h is not None
    torch.testing.assert_close(logprobs, torch.tensor([0.5, 1.0]).log())
    (1e6 * logprobs.sum() + 1e6 * h.sum()).backward()
    for grad in (hidden.grad, weight.grad):
        assert grad is not None
        assert torch.isfinite(grad).all()


def test_outside_of_a_slice_of_the_vocabulary() -> None:
    kept = torch.tensor([[1, 4, 9], [9, -1, -1], [-1, -1, -1]], dtype=torch.int32)
    assert outside(kept, 3, 4).tolist() == [
        [True, False, True, True],
        [True, True, True, True],
        [False, False, False, False],
    ]
