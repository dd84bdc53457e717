"""Estimators by turn: a turn is trained on what it earned, and on what followed it.

r[k] is what the environment gave for turn k, G[k] = r[k] + gamma G[k+1]. All tokens of a turn share its advantage (but
those of `turn_gae` under `bi_level`). With one turn an episode each is an estimator by episode: `turn_returns` is
`reinforce_pp` at gamma 1, `turn_grpo` is `grpo`, `turn_gae` under `bi_level` is `gae`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from asyncrl.learner.advantages.episodes import Singleton, gather, normalised_in_group, promoted
from asyncrl.learner.advantages.episodes import whiten as _whiten
from asyncrl.learner.advantages.estimator import Advantages, EstimatorInputs, estimator
from asyncrl.learner.advantages.returns import discounted
from asyncrl.learner.advantages.turns import Turns, cells, earned, turns_in
from asyncrl.learner.ragged import masked, required


@estimator(needs=("turn_of", "turn_rewards"))
def turn_returns(inputs: EstimatorInputs, *, gamma: float = 1.0, whiten: bool = True) -> Advantages:
    """A = G of the turn, whitened over the batch's policy tokens: REINFORCE++ (2501.03262) with turns as its steps."""
    turns = turns_in(inputs)
    g = turns.put(turns.returns(earned(inputs, turns), gamma))
    return Advantages(_whiten(g, inputs.mask) if whiten else g, g)


@estimator(needs=("turn_of", "turn_rewards"))
def turn_grpo(
    inputs: EstimatorInputs,
    *,
    gamma: float = 1.0,
    eps: float = 1e-6,
    scale_by_std: bool = True,
    variant: Literal["turn", "process"] = "turn",
    singleton: Singleton = "zero",
) -> Advantages:
    """GRPO by turn; a number that has no other to be compared with gives 0 (`singleton: reward`: itself).

    `variant`: `turn`: A[k] = (G[k] - mean) / (std + eps) over the siblings' turns of the same number, as PipelineRL
    groups by (group, step); siblings that ended earlier are not among them. `process`: GRPO with process rewards
    (2402.03300, section 4.1.3): r[k] normalised over all turns of the group, then summed from the turn on.
    """
    turns = turns_in(inputs)
    r, group = earned(inputs, turns), gather(inputs).group[turns.episode]
    if variant == "process":
        return _on_turns(turns.returns(_normalised(r, group, eps, scale_by_std, singleton), gamma), turns)
    stride = int(turns.number.max()) + 1 if turns.number.numel() else 1
    g = turns.returns(r, gamma)
    return _on_turns(_normalised(g, group * stride + turns.number, eps, scale_by_std, singleton), turns)


@estimator(needs=("values", "turn_of", "turn_rewards"))
def turn_gae(
    inputs: EstimatorInputs,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    variant: Literal["turn", "bi_level"] = "turn",
    token_gamma: float = 1.0,
    whiten: bool = True,
) -> Advantages:
    """GAE (1506.02438) with turns as its steps: delta = r + gamma V' - V, A = delta + gamma lam A'.

    `variant`: `turn`: V of a turn is that at its first token, all its tokens share A, and A + V is what the critic is
    trained towards at each of them (AReaL). `bi_level`: V of a turn is that at its last token, whose A + V is then the
    reward at the end of a GAE over the turn's tokens, with token_gamma and the same lam (RAGEN, VAGEN, which whiten
    always; they take tokens with a reward other than 0 for the ends of turns, asyncrl has the ends recorded).
    """
    turns, values = turns_in(inputs), promoted(required("values", inputs.values))
    if variant == "bi_level":
        a, returns = _bi_level(inputs, turns, values, gamma, lam, token_gamma)
    else:
        v = turns.first(values)
        of_turn = turns.returns(earned(inputs, turns) + gamma * turns.after(v) - v, gamma * lam)
        a, returns = turns.put(of_turn), turns.put(of_turn + v)
    return Advantages(_whiten(a, inputs.mask) if whiten else a, returns)


def _bi_level(
    inputs: EstimatorInputs, turns: Turns, values: Tensor, gamma: float, lam: float, token_gamma: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, `[T]`. Of a KL in the reward, a turn has the part at its last token; the other tokens
    have theirs."""
    end, v = turns.end, values[turns.token]
    r = promoted(masked(required("turn_rewards", inputs.turn_rewards), inputs.mask))[turns.token].to(v.dtype)
    of_turn = turns.returns(r[end] + gamma * turns.after(v[end]) - v[end], gamma * lam)
    r = r.masked_scatter(end, of_turn + v[end])
    goes_on = (~end).to(v.dtype)
    delta = r + token_gamma * goes_on * torch.roll(v, -1) - v
    a = discounted(delta, goes_on * token_gamma * lam)
    return turns.put_tokens(a), turns.put_tokens(a + v)


def _normalised(x: Tensor, labels: Tensor, eps: float, scale_by_std: bool, singleton: Singleton) -> Tensor:
    """GRPO's normalisation of `x[K]` among those with equal labels, `[K]`."""
    compared = cells(x, labels)
    value = normalised_in_group(compared, x, eps, scale_by_std, "group")
    return torch.where(compared.alone, x if singleton == "reward" else 0.0, value)


def _on_turns(x: Tensor, turns: Turns) -> Advantages:
    advantages = turns.put(x)
    return Advantages(advantages, advantages)
