"""Reward shaping by hand-made numbers."""

from __future__ import annotations

import pytest
import torch

from asyncrl.learner.objective import shaping


def doubles(*x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


def inputs(rewards: torch.Tensor, **more: torch.Tensor) -> shaping.ShapingInputs:
    zeros = torch.zeros(len(rewards), dtype=torch.long)
    others = dict.fromkeys(("groups", "output_tokens", "input_tokens", "turns"), zeros) | {"truncated": zeros > 0}
    return shaping.ShapingInputs(rewards=rewards, **others | more)


def test_overlong_penalty() -> None:
    long = inputs(doubles(1, 1, 1, 1, 1), output_tokens=torch.tensor([10, 80, 90, 100, 130]))
    got = shaping.overlong_penalty(long, max_tokens=100, buffer_tokens=20)
    torch.testing.assert_close(got, doubles(1, 1, 0.5, 0, -1.5))
    got = shaping.overlong_penalty(long, max_tokens=100, buffer_tokens=20, factor=2.0, floor=True)
    torch.testing.assert_close(got, doubles(1, 1, 0, -1, -1))
    with pytest.raises(ValueError, match="buffer_tokens is 0"):
        shaping.overlong_penalty(long, max_tokens=100, buffer_tokens=0)


def test_stop_properly_and_clip() -> None:
    got = shaping.stop_properly(inputs(doubles(1, 1), truncated=torch.tensor([True, False])), coefficient=0.2)
    torch.testing.assert_close(got, doubles(0.2, 1))
    torch.testing.assert_close(shaping.clip(inputs(doubles(-100, 3, 100)), bias=-1, scale=2), doubles(-20, 4, 20))


def test_length_penalty() -> None:
    rewards, groups = doubles(1, 0, 0, 0), torch.tensor([5, 5, 2, 2])
    played = inputs(
        rewards,
        groups=groups,
        output_tokens=torch.tensor([50, 100, 10, 20]),
        input_tokens=torch.tensor([0, 0, 3, 3]),
        turns=torch.tensor([2, 4, 1, 1]),
    )
    got = shaping.length_penalty(played)
    torch.testing.assert_close(got, doubles(1 - 0.5 * (0.125 + 0.05), -0.5 * (0.25 + 0.1), 0, 0))


@pytest.mark.parametrize(
    ("method", "expected"),
    [("pow", (4.0, 0.0, 1.0, 4.0)), ("max_min", (1.0, 0.0, 0.0, 1.0)), ("max_random", (0.1, 0.1, 0.1, 0.4))],
)
def test_pf_ppo(method: str, expected: tuple[float, ...]) -> None:
    rewards = doubles(-2, 0, 1, 2)
    weights = shaping.pf_ppo_weights(rewards, method=method)
    torch.testing.assert_close(weights, doubles(*expected) + 1e-8)
    many = doubles(*([-2, 0, 1, 2] * 500))
    drawn = shaping.pf_ppo_resample(many, method=method, generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(drawn % 4, minlength=4).double() / 2000
    torch.testing.assert_close(counts, doubles(*expected) / sum(expected), atol=0.05, rtol=0)
    again = shaping.pf_ppo_resample(many, method=method, generator=torch.Generator().manual_seed(0))
    assert torch.equal(drawn, again)
