"""Turns as the steps of their episodes: what estimators by turn compute on, and back to tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.learner.advantages.episodes import Episodes, promoted
from asyncrl.learner.advantages.estimator import EstimatorInputs
from asyncrl.learner.advantages.returns import discounted
from asyncrl.learner.ragged import masked, required, row_of_token, segment_sum, unit_ids


@dataclass(frozen=True, slots=True)
class Turns:
    """The K turns of a batch that have tokens, episode after episode, in the order in which they were played."""

    token: Tensor
    """[N] the index in `[T]` of each policy token, turn after turn; within a turn in the order of the batch."""
    turn: Tensor
    """[N] the turn of each, 0..K-1."""
    end: Tensor
    """[N] bool: the turn's last token."""
    episode: Tensor
    """[K] the episode of each turn, as `Episodes` numbers them."""
    number: Tensor
    """[K] its number in the episode, from 0; a turn without a token leaves a gap."""
    last: Tensor
    """[K] bool: the episode's last turn."""
    total: int
    """T"""

    def sum(self, x: Tensor) -> Tensor:
        """Sum of `x[T]` over the tokens of each turn, `[K]`."""
        return segment_sum(promoted(x)[self.token], self.turn, self.episode.numel())

    def first(self, x: Tensor) -> Tensor:
        """`x[T]` at the first token of each turn, `[K]`."""
        begin = torch.ones_like(self.end)
        begin[1:] = self.end[:-1]
        return x[self.token[begin]]

    def put(self, x: Tensor) -> Tensor:
        """`x[K]` on every token of each turn, `[T]`, 0 elsewhere."""
        return self.put_tokens(x[self.turn])

    def put_tokens(self, x: Tensor) -> Tensor:
        """`x[N]` back on the tokens, `[T]`, 0 elsewhere."""
        return torch.zeros(self.total, dtype=x.dtype, device=x.device).index_put((self.token,), x)

    def after(self, x: Tensor) -> Tensor:
        """x of the episode's next turn, `[K]`, 0 after the last."""
        return torch.where(self.last, 0.0, torch.roll(x, -1))

    def returns(self, x: Tensor, gamma: float) -> Tensor:
        """y = x + gamma y of the episode's next turn, `[K]`."""
        return discounted(x, (~self.last).to(x.dtype) * gamma)


def turns_of(turn_of: Tensor, lengths: Tensor, episodes: Tensor) -> Turns:
    """`turn_of[T]`: the number of each token's turn in its episode, below 0 for tokens of none."""
    token = (turn_of >= 0).nonzero().squeeze(1)
    of_row, _ = unit_ids(lengths, episodes)
    stride = int(turn_of.max()) + 1 if token.numel() else 1
    key = of_row[row_of_token(lengths, turn_of.numel())[token]] * stride + turn_of[token]
    key, order = key.sort(stable=True)
    names, turn = torch.unique_consecutive(key, return_inverse=True)
    episode = names // stride
    return Turns(token[order], turn, _ends(turn), episode, names % stride, _ends(episode), turn_of.numel())


def turns_in(inputs: EstimatorInputs) -> Turns:
    """The turns of the policy tokens. Raises ValueError where one belongs to no turn."""
    turn_of = required("turn_of", inputs.turn_of)
    if bool((inputs.mask & (turn_of < 0)).any()):
        raise ValueError(
            "an episode of this batch has no record of what each turn earned: an asyncrl before this one played it. "
            "Train on the groups of that asyncrl with an estimator by episode, or begin a new run."
        )
    return turns_of(torch.where(inputs.mask, turn_of, -1), inputs.lengths, inputs.episodes)


def earned(inputs: EstimatorInputs, turns: Turns) -> Tensor:
    """The reward of each turn, `[K]`, at least float32."""
    return turns.sum(masked(required("turn_rewards", inputs.turn_rewards), inputs.mask))


def cells(x: Tensor, labels: Tensor) -> Episodes:
    """Values `x[n]` and the statistics of those with equal integer labels `[n]`, as if each were an episode and each
    label a group."""
    names, cell = torch.unique(labels, return_inverse=True)
    size = segment_sum(torch.ones_like(cell), cell, names.numel()).to(x.dtype)
    return Episodes(of_row=cell, group=cell, reward=x, tokens=torch.ones_like(x), size=size)


def _ends(labels: Tensor) -> Tensor:
    """[n] bool: the last of equal labels in a row."""
    ends = torch.ones_like(labels, dtype=torch.bool)
    ends[:-1] = labels[1:] != labels[:-1]
    return ends
