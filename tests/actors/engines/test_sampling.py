from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncrl.actors.engines.sampling import BLOCK, LARGE, sample, uniforms


def plain(logits: torch.Tensor, noise: torch.Tensor, temperature: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """Token by token, in double precision."""
    logprobs = torch.log_softmax(logits.double() / temperature.double()[:, None], -1)
    tokens = []
    for row, u in zip(logprobs.exp(), noise.tolist(), strict=True):
        reached = torch.nonzero(row.cumsum(0) > u * row.sum())
        tokens.append(int(reached[0]))
    return tokens, logprobs[torch.arange(len(logits)), tokens]


@pytest.mark.parametrize("vocab", [5, BLOCK, LARGE - 1, LARGE, LARGE + 37])
def test_tokens_are_where_the_cumulative_distribution_passes_the_noise(vocab: int) -> None:
    torch.manual_seed(vocab)
    logits, noise = 3 * torch.randn(300, vocab), torch.rand(300, dtype=torch.float64)
    temperature = torch.where(torch.arange(300) % 2 == 0, 1.0, 0.7)
    tokens, logprobs = sample(logits, noise, temperature)
    expected, expected_logprobs = plain(logits, noise, temperature)
    # Noise that falls on the border of two tokens may be rounded to either.
    assert sum(a != b for a, b in zip(tokens.tolist(), expected, strict=True)) <= 1
    same = tokens == torch.tensor(expected)
    torch.testing.assert_close(logprobs[same].double(), expected_logprobs[same], atol=5e-6, rtol=0)


@pytest.mark.parametrize("vocab", [7, LARGE + 37])
@pytest.mark.parametrize("noise", [0.0, 0.3, 1 - 2**-53])
def test_a_token_of_probability_zero_is_never_sampled(vocab: int, noise: float) -> None:
    possible = torch.tensor([3, 6]) if vocab < LARGE else torch.tensor([130, LARGE + 1])
    logits = torch.full((4, vocab), -torch.inf)
    logits[:, possible] = 0.0
    tokens, logprobs = sample(logits, torch.full((4,), noise, dtype=torch.float64), torch.ones(4))
    assert set(tokens.tolist()) == {int(possible[int(noise > 0.5)])}
    torch.testing.assert_close(logprobs, torch.full((4,), 0.5).log())


@pytest.mark.parametrize("vocab", [50, LARGE + 1])
def test_greedy_rows_take_the_largest_logit(vocab: int) -> None:
    logits = torch.randn(6, vocab)
    greedy = torch.tensor([True, False] * 3)
    tokens, logprobs = sample(logits, torch.rand(6, dtype=torch.float64), torch.ones(6), greedy)
    assert torch.equal(tokens[greedy], logits.argmax(-1)[greedy])
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1)[torch.arange(6), tokens])


def test_noise_is_of_the_seed_alone() -> None:
    """Whatever was drawn before, and as a generator of its own gives it."""
    for seed in (7, 0, 2**64 - 1, 2**64 + 7, 7):
        own = np.random.Generator(np.random.Philox(key=seed % 2**64))
        np.testing.assert_array_equal(uniforms(seed, 5), own.random(5))
