"""Estimators with a value per token: discounted returns, GAE, V-trace.

All of them are one recurrence, y[t] = x[t] + c[t] y[t+1], over the policy tokens of an episode. Tool output is skipped:
for the recurrence, the token before it is followed directly by the next policy token, and rows of one episode follow
one
another in the order of the batch. Nothing is read beyond an episode's last policy token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyncrl.learner.advantages.episodes import promoted
from asyncrl.learner.advantages.episodes import whiten as _whiten
from asyncrl.learner.advantages.estimator import Advantages, EstimatorInputs, estimator
from asyncrl.learner.ragged import clamped_exp, log_ratio, required, row_of_token, unit_ids


@dataclass(frozen=True, slots=True)
class Steps:
    """The N policy tokens of a batch as steps of their episodes, episode after episode."""

    token: Tensor
    """[N] the index in `[T]` of each step."""
    episode: Tensor
    """[N] the episode of each step."""
    last: Tensor
    """[N] bool: the episode's last step."""
    total: int
    """T"""

    @property
    def first(self) -> Tensor:
        """[N] bool: the episode's first step."""
        first = torch.ones_like(self.last)
        first[1:] = self.last[:-1]
        return first

    def take(self, x: Tensor) -> Tensor:
        """`x[T]` at the steps, `[N]`."""
        return promoted(x)[self.token]

    def put(self, x: Tensor) -> Tensor:
        """`x[N]` back on the tokens, `[T]`, 0 on those that are no step."""
        return torch.zeros(self.total, dtype=x.dtype, device=x.device).index_put((self.token,), x)

    def goes_on(self, dtype: torch.dtype) -> Tensor:
        """[N] 1 where the episode has a next step, 0 at its last."""
        return (~self.last).to(dtype)

    def after(self, x: Tensor) -> Tensor:
        """x of the next step, `[N]`, 0 after the last."""
        return torch.where(self.last, 0.0, torch.roll(x, -1))


def steps_of(mask: Tensor, lengths: Tensor, episodes: Tensor) -> Steps:
    """The steps of a flat batch."""
    token = mask.nonzero().squeeze(1)
    of_row, _ = unit_ids(lengths, episodes)
    episode = of_row[row_of_token(lengths, mask.numel())[token]]
    episode, order = episode.sort(stable=True)
    token = token[order]
    last = torch.ones_like(token, dtype=torch.bool)
    last[:-1] = episode[1:] != episode[:-1]
    return Steps(token, episode, last, mask.numel())


def discounted(x: Tensor, carry: Tensor) -> Tensor:
    """y[t] = x[t] + carry[t] y[t+1], `[N]`; carry is 0 at the end of each part.

    By doubling: log2(N) passes over the whole, each joining twice as many steps, instead of a loop over tokens.
    """
    reach = 1
    while reach < x.numel():
        x = x + carry * _ahead(x, reach)
        carry = carry * _ahead(carry, reach)
        reach *= 2
    return x


def _ahead(x: Tensor, by: int) -> Tensor:
    return torch.cat([x[by:], x.new_zeros(by)])


@estimator(needs=("values",))
def gae(inputs: EstimatorInputs, *, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True) -> Advantages:
    """GAE (1506.02438): delta = r + gamma V' - V, A = delta + gamma lam A'; returns = A + V, before any whitening.

    `values[T]` at the policy tokens. V' is 0 after the last. `whiten` over the batch's policy tokens (verl always).
    """
    steps, values = _steps(inputs), required("values", inputs.values)
    a, v = _gae(steps, inputs.rewards, values, gamma, lam)
    return _advantages(steps, a, a + v, inputs.mask, whiten)


@estimator(needs=("values",))
def vapo_gae(
    inputs: EstimatorInputs,
    *,
    alpha: float = 0.05,
    gamma: float = 1.0,
    lam_value: float = 1.0,
    whiten: bool = False,
) -> Advantages:
    """VAPO (2504.05118): the policy's lam = 1 - 1 / (alpha |y|), larger for longer episodes; the critic's is lam_value.

    |y|: policy tokens of the episode. alpha |y| below 1 gives lam 0 (NeMo).
    """
    steps, values = _steps(inputs), required("values", inputs.values)
    length = steps.episode.bincount()[steps.episode].to(torch.promote_types(values.dtype, torch.float32))
    lam = 1 - 1 / (alpha * length).clamp(min=1)
    a, _ = _gae(steps, inputs.rewards, values, gamma, lam)
    for_critic, v = _gae(steps, inputs.rewards, values, gamma, lam_value)
    return _advantages(steps, a, for_critic + v, inputs.mask, whiten)


@estimator(needs=("values", "logprobs"))
def vtrace(
    inputs: EstimatorInputs,
    *,
    gamma: float = 1.0,
    rho_max: float = 1.0,
    c_max: float = 1.0,
) -> Advantages:
    """V-trace (IMPALA, 1802.01561): the critic's target corrected for off-policy tokens, and the matching advantage.

    rho = exp(logprobs - behaviour), capped at rho_max and, for the trace, c_max: v - V = delta + gamma c (v' - V') with
    delta = rho (r + gamma V' - V); A = rho (r + gamma v' - V). A holds rho already: use a loss without weights.
    """
    values, logprobs = required("values", inputs.values), required("logprobs", inputs.logprobs)
    steps = _steps(inputs)
    r, v = steps.take(inputs.rewards), steps.take(values)
    ratio = clamped_exp(steps.take(log_ratio(logprobs, inputs.behaviour, inputs.mask)))
    rho, c = ratio.clamp(max=rho_max), ratio.clamp(max=c_max)
    delta = rho * (r + gamma * steps.after(v) - v)
    target = v + discounted(delta, steps.goes_on(c.dtype) * gamma * c)
    return _advantages(steps, rho * (r + gamma * steps.after(target) - v), target, inputs.mask, False)


def reinforce_pp(
    inputs: EstimatorInputs,
    *,
    gamma: float = 1.0,
    variant: Literal["carry", "positions", "reset"] = "carry",
) -> Advantages:
    """REINFORCE++ (2501.03262): the discounted return G = r + gamma G', whitened over the batch's policy tokens.

    `variant`: at a hole, `carry` the return through as it is (verl); `positions`: discounted over each token of the
    hole too (slime; the same at gamma 1, and one step from a row to the next); `reset`: what comes after a hole is not
    credited to what comes before it (older verl, SkyRL; wrong for tool calls).
    """
    steps = _steps(inputs)
    r = steps.take(inputs.rewards)
    carry = steps.goes_on(r.dtype) * gamma
    if variant == "positions":
        row = row_of_token(inputs.lengths, inputs.mask.numel())[steps.token]
        ahead = torch.where(torch.roll(row, -1) == row, torch.roll(steps.token, -1) - steps.token, 1).clamp(min=1)
        carry = steps.goes_on(r.dtype) * gamma ** ahead.to(r.dtype)
    if variant == "reset":
        carry = torch.where(torch.roll(steps.token, -1) == steps.token + 1, carry, 0.0)
    g = discounted(r, carry)
    return _advantages(steps, g, g, inputs.mask, True)


@estimator(needs=("baseline",))
def remax(inputs: EstimatorInputs) -> Advantages:
    """ReMax (2310.10505): A = rewards from here on - the reward of the greedy answer, `baseline[B]`. verl."""
    baseline, lengths, mask = required("baseline", inputs.baseline), inputs.lengths, inputs.mask
    if baseline.shape != lengths.shape:
        raise ValueError(f"remax: baseline is {tuple(baseline.shape)}, expected [{lengths.numel()}], one of each row.")
    steps = _steps(inputs)
    r = steps.take(inputs.rewards)
    g = discounted(r, steps.goes_on(r.dtype))
    a = g - promoted(baseline)[row_of_token(lengths, mask.numel())[steps.token]].to(g.dtype)
    return _advantages(steps, a, g, mask, False)


def _steps(inputs: EstimatorInputs) -> Steps:
    return steps_of(inputs.mask, inputs.lengths, inputs.episodes)


def _gae(steps: Steps, rewards: Tensor, values: Tensor, gamma: float, lam: Tensor | float) -> tuple[Tensor, Tensor]:
    r, v = steps.take(rewards), steps.take(values)
    delta = r + gamma * steps.after(v) - v
    return discounted(delta, steps.goes_on(delta.dtype) * gamma * lam), v


def _advantages(steps: Steps, a: Tensor, returns: Tensor, mask: Tensor, whitened: bool) -> Advantages:
    advantages = steps.put(a)
    return Advantages(_whiten(advantages, mask) if whitened else advantages, steps.put(returns))
