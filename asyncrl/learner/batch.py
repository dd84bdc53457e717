"""Trajectories as the flat tensors that everything in the learner works on: tokens [T] cut into rows [B]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from asyncrl.learner.backends.protocol import Packed, Want
from asyncrl.learner.ragged import row_of_token
from asyncrl.trajectory import CONTEXT, Float32, Row, Trajectory

_CUT = ("max_turns", "max_tokens", "length")
"""Stop reasons of an episode that a limit ended."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one training step consumes, or some rows of it."""

    token_ids: Tensor
    """[T] int64"""
    mask: Tensor
    """[T] bool: policy tokens that carry loss. A token older than the bound (`over_age: mask`) does not."""
    behaviour: Tensor
    """[T] float32 logprobs, 0 where the policy did not sample"""
    versions: Tensor
    """[T] int64, CONTEXT where the policy did not sample"""
    rewards: Tensor
    """[T] float32: an episode's reward, on the last policy token of its last row with one; masked or not"""
    reward_components: Tensor
    """[K, T] float32: the same for each named reward of the environments, in the order of their names, unweighted"""
    reward_names: tuple[str, ...]
    """K"""
    lengths: Tensor
    """[B] int64"""
    groups: Tensor
    """[B] int64: place of the row's group in the batch, 0..G-1"""
    episodes: Tensor
    """[B] int64: place of the row's trajectory in the batch"""
    row_weights: Tensor
    """[B] float32: what the row's advantages are multiplied by; 0 for a group that the buffer would have filtered"""
    loss_weights: Tensor
    """[B] float32: what everything in the row's loss is multiplied by; 1 unless `learner.pf_ppo` drew it otherwise"""
    turns: Tensor
    """[B] int64: assistant turns of the row's episode"""
    truncated: Tensor
    """[B] bool: a limit of turns or tokens ended the row's episode"""
    greedy: Tensor
    """[B] bool: of the group's greedy episode, there for its reward alone (`learner.greedy_baseline`)"""
    envs: Tensor
    """[B] int64: place in `env_names` of the environment that the row's episode is counted under"""
    env_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def baseline(self) -> Tensor:
        """[B] float: the reward of the greedy episode of the row's group. Raises ValueError where a group has none."""
        of_rows = torch.zeros(len(self)).index_add(0, row_of_token(self.lengths, len(self.rewards)), self.rewards)
        groups = int(self.groups.max()) + 1
        if not torch.isin(self.groups, self.groups[self.greedy]).all():
            raise ValueError("baseline: a group has no greedy episode; set learner.greedy_baseline true.")
        return torch.zeros(groups).index_add(0, self.groups[self.greedy], of_rows[self.greedy])[self.groups]

    @property
    def sampled(self) -> Tensor:
        """[T] bool: policy tokens, those too that carry no loss because they are over age."""
        return self.mask | (self.versions != CONTEXT)

    def tokens_of(self, rows: Tensor) -> Tensor:
        """Indices [t] into the tokens, of the rows [b] in their order."""
        starts = self.lengths.cumsum(0) - self.lengths
        lengths = self.lengths[rows]
        offsets = torch.repeat_interleave(starts[rows] - (lengths.cumsum(0) - lengths), lengths)
        return offsets + torch.arange(int(lengths.sum()))

    def take(self, rows: Tensor) -> Batch:
        """The rows [b], in their order."""
        t = self.tokens_of(rows)
        of_tokens = ("token_ids", "mask", "behaviour", "versions", "rewards")
        of_rows = (
            "lengths",
            "groups",
            "episodes",
            "row_weights",
            "loss_weights",
            "turns",
            "truncated",
            "greedy",
            "envs",
        )
        return replace(
            self,
            reward_components=self.reward_components[:, t],
            **{name: getattr(self, name)[t] for name in of_tokens},
            **{name: getattr(self, name)[rows] for name in of_rows},
        )

    def packed(self, wants: frozenset[Want] = frozenset(("logprobs",))) -> Packed:
        return Packed(self.token_ids, self.sampled, tuple(self.lengths.tolist()), wants)


def flatten(
    trajectories: Sequence[Trajectory],
    groups: Sequence[int],
    mask_before: int | None = None,
    weights: Sequence[float] | None = None,
    *,
    greedy_baseline: bool = False,
) -> Batch:
    """One rank's share of a batch, in an order that depends on nothing but the batch.

    `groups`: the ids of the whole batch's groups, in its order. `mask_before`: tokens of an earlier version carry no
    loss. `weights`: of each trajectory, 1 where not given. `greedy_baseline`: the first trajectory of each group is a
    greedy one, and carries none either. Raises ValueError for a trajectory of another group, and for
    a row that begins with a policy token: nothing predicts that one.
    """
    place = {group: i for i, group in enumerate(groups)}
    foreign = [t.id for t in trajectories if t.id.group not in place]
    if foreign:
        raise ValueError(f"trajectory {foreign[0]} is in none of the batch's groups {list(groups)}")
    weighted = zip(trajectories, weights or [1.0] * len(trajectories), strict=True)
    ordered = sorted(weighted, key=lambda pair: (place[pair[0].id.group], pair[0].id.index))
    rows = [(episode, t, row) for episode, (t, _) in enumerate(ordered) for row in t.rows]
    if not rows:
        raise ValueError("the batch holds no trajectory: learner.groups_per_step groups were expected")
    for _, t, row in rows:
        if row.mask[0]:
            raise ValueError(f"trajectory {t.id}: a row begins with a sampled token; a prompt must come before it")
    names = sorted({name for t in trajectories for name in t.rewards}) or [""]
    environments = sorted({t.env for t in trajectories})
    mask = np.concatenate([row.mask for _, _, row in rows])
    greedy = np.array([greedy_baseline and t.id.index == 0 for _, t, _ in rows])
    carries_loss = mask & ~np.repeat(greedy, [len(row) for _, _, row in rows])
    versions = np.concatenate([row.versions for _, _, row in rows]).astype(np.int64)
    return Batch(
        token_ids=torch.from_numpy(np.concatenate([row.token_ids for _, _, row in rows]).astype(np.int64)),
        mask=torch.from_numpy(carries_loss if mask_before is None else carries_loss & (versions >= mask_before)),
        behaviour=torch.from_numpy(np.concatenate([row.logprobs for _, _, row in rows])),
        versions=torch.from_numpy(versions),
        rewards=torch.from_numpy(np.concatenate([_paid(t, row, t.reward) for _, t, row in rows])),
        reward_components=torch.from_numpy(
            np.stack([np.concatenate([_paid(t, row, t.rewards.get(n, 0.0)) for _, t, row in rows]) for n in names])
        ),
        reward_names=tuple(names),
        lengths=torch.tensor([len(row) for _, _, row in rows]),
        groups=torch.tensor([place[t.id.group] for _, t, _ in rows]),
        episodes=torch.tensor([episode for episode, _, _ in rows]),
        row_weights=torch.tensor([ordered[episode][1] for episode, _, _ in rows], dtype=torch.float32),
        loss_weights=torch.ones(len(rows)),
        turns=torch.tensor([t.turns for _, t, _ in rows]),
        truncated=torch.tensor([t.stop_reason in _CUT for _, t, _ in rows]),
        greedy=torch.from_numpy(greedy),
        envs=torch.tensor([environments.index(t.env) for _, t, _ in rows]),
        env_names=tuple(environments),
    )


def _paid(t: Trajectory, row: Row, reward: float) -> Float32:
    """[T] of the row: the reward where it is paid."""
    paid = np.zeros(len(row), np.float32)
    if row is [r for r in t.rows if r.mask.any()][-1]:
        paid[np.flatnonzero(row.mask)[-1]] = reward
    return paid
