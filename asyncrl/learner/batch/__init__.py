"""Trajectories as the flat tensors that everything in the learner works on: tokens [T] cut into rows [B]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.learner.backends.protocol import Packed, Want
from asyncrl.learner.batch.hints import HintsOf, RowHints, of_trajectories
from asyncrl.learner.batch.kept import Kept, of_rows, recorded
from asyncrl.learner.batch.taught import Taught, of_groups
from asyncrl.learner.batch.turn_fields import StateNumbers, turn_fields
from asyncrl.learner.ragged import row_of_token, spread
from asyncrl.trajectory import CONTEXT, Float32, Row, Trajectory
from asyncrl.wire.teacher_scores import GroupScores

_TRUNCATED = ("max_turns", "max_tokens", "length")
"""Stop reasons of an episode that a limit ended."""
_PER_TOKEN = ("token_ids", "mask", "behaviour", "versions", "rewards", "turn_of", "turn_rewards", "states")
"""Fields of a Batch of shape [T]."""
_PER_ROW = (
    "lengths",
    "groups",
    "episodes",
    "row_weights",
    "loss_weights",
    "replayed",
    "turns",
    "truncated",
    "greedy",
    "envs",
)
"""Fields of a Batch of shape [B]."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows that one training step consumes, or some of them."""

    token_ids: Tensor
    """[T] int64"""
    mask: Tensor
    """[T] bool: policy tokens that carry loss; one older than the bound (`over_age: mask`), or with more kept ids than
    are recorded, carries none"""
    behaviour: Tensor
    """[T] float32 logprobs, 0 where the policy did not sample"""
    versions: Tensor
    """[T] int64, CONTEXT where the policy did not sample"""
    rewards: Tensor
    """[T] float32: an episode's reward, on the last policy token of its last row with one; masked or not"""
    turn_of: Tensor
    """[T] int32: number of the assistant turn that sampled the token, from 0 in each episode; NO_TURN for context, and
    where the trajectory has no rewards by turn"""
    turn_rewards: Tensor
    """[T] float32: each turn's reward, on its last token; in all, those of `rewards` up to rounding"""
    states: Tensor
    """[T] int32, on the tokens of a turn: number of the state in which the turn was sampled, the same for equal states
    within a group; NO_STATE where it has no name"""
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
    """[B] float32: factor of the row's advantages; 0 for a group that the buffer would have filtered"""
    loss_weights: Tensor
    """[B] float32: factor of the row's loss; 1 unless its group is replayed (`buffer.replay`), or `learner.pf_ppo` drew
    the episode more or less often"""
    replayed: Tensor
    """[B] bool: the row's group was used before, and is drawn again (`buffer.replay`)"""
    turns: Tensor
    """[B] int64: assistant turns of the row's episode"""
    truncated: Tensor
    """[B] bool: a limit of turns or tokens ended the row's episode"""
    greedy: Tensor
    """[B] bool: the row is of the group's greedy episode, which only gives a reward (`learner.greedy_baseline`)"""
    envs: Tensor
    """[B] int64: place in `env_names` of the environment that the row's episode is counted under"""
    env_names: tuple[str, ...]
    demonstrations: Batch | None = None
    """Rows of demonstrations beside the groups, with a loss of their own (step/demonstrations.py)"""
    kept: Kept | None = None
    """Kept ids of the T tokens; None: all were drawn from the whole vocabulary"""
    taught: Taught | None = None
    """What a teacher on a server said of the T tokens; None: there is none"""
    hints: RowHints | None = None
    """What the teacher is shown within the B rows; None: it reads what the policy reads"""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def baseline(self) -> Tensor:
        """[B] float: the reward of the greedy episode of the row's group. Raises ValueError where a group has none."""
        per_row = torch.zeros(len(self)).index_add(0, row_of_token(self.lengths, len(self.rewards)), self.rewards)
        groups = int(self.groups.max()) + 1
        if not torch.isin(self.groups, self.groups[self.greedy]).all():
            raise ValueError("baseline: a group has no greedy episode; set learner.greedy_baseline true.")
        return torch.zeros(groups).index_add(0, self.groups[self.greedy], per_row[self.greedy])[self.groups]

    @property
    def sampled(self) -> Tensor:
        """[T] bool: policy tokens, including those that carry no loss because they are over age."""
        return self.mask | (self.versions != CONTEXT)

    @property
    def compared(self) -> Tensor:
        """[T] bool: policy tokens at which a teacher counts: with hints, those of the rows that have one."""
        if self.hints is None:
            return self.sampled
        return self.sampled & spread(self.hints.lengths > 0, self.lengths, len(self.mask))

    def tokens_of(self, row_ids: Tensor) -> Tensor:
        """Indices [t] of the tokens of the rows [b], in the rows' order."""
        starts = self.lengths.cumsum(0) - self.lengths
        lengths = self.lengths[row_ids]
        offsets = torch.repeat_interleave(starts[row_ids] - (lengths.cumsum(0) - lengths), lengths)
        return offsets + torch.arange(int(lengths.sum()))

    def take(self, row_ids: Tensor) -> Batch:
        """The rows [b], in their order."""
        t = self.tokens_of(row_ids)
        return replace(
            self,
            reward_components=self.reward_components[:, t],
            kept=None if self.kept is None else self.kept.take(t),
            taught=None if self.taught is None else self.taught.take(t),
            hints=None if self.hints is None else self.hints.take(row_ids),
            **{name: getattr(self, name)[t] for name in _PER_TOKEN},
            **{name: getattr(self, name)[row_ids] for name in _PER_ROW},
        )

    def packed(self, wants: frozenset[Want] = frozenset(("logprobs", "entropy"))) -> Packed:
        kept = None if self.kept is None else self.kept.padded(self.sampled)
        recorded = None if self.taught is None or "teacher" not in wants else self.taught.of(self.sampled)
        hints = None if self.hints is None or "teacher" not in wants else self.hints.packed()
        return Packed(self.token_ids, self.sampled, tuple(self.lengths.tolist()), wants, kept, recorded, hints)


def flatten(
    trajectories: Sequence[Trajectory],
    groups: Sequence[int],
    mask_before: int | None = None,
    weights: Sequence[float] | None = None,
    *,
    greedy_baseline: bool = False,
    loss_weights: Mapping[int, float] | None = None,
    scores: Sequence[GroupScores] = (),
    words: int = 0,
) -> Batch:
    """One rank's share of a batch, in an order that depends on nothing but the batch.

    `groups`: the ids of the whole batch's groups, in its order. `mask_before`: tokens of an earlier version carry no
    loss. `weights`: of each trajectory, 1 where not given. `greedy_baseline`: the first trajectory of each group is a
    greedy one, and carries none either. `loss_weights`: the factor of the loss of each replayed group, by id; of others
    it is 1. `scores`: of a teacher on servers, with the `words` most likely of each token. Raises ValueError for a
    trajectory of another group, and for a row that begins with a policy token: nothing predicts that one.
    """
    ordered = _in_order(trajectories, groups, weights or [1.0] * len(trajectories))
    context = _Context(
        place_of_group={group: i for i, group in enumerate(groups)},
        reward_names=tuple(sorted({name for t in trajectories for name in t.rewards}) or [""]),
        env_names=tuple(sorted({t.env for t in trajectories})),
        oldest=mask_before,
        greedy_baseline=greedy_baseline,
        loss_weights=loss_weights or {},
    )
    numbers = StateNumbers()
    rows = [
        _row(context, i, t, weight, row) | of_row
        for i, (t, weight) in enumerate(ordered)
        for row, of_row in zip(t.rows, turn_fields(t, numbers), strict=True)
    ]
    if not rows:
        raise ValueError("the batch holds no trajectory: learner.groups_per_step groups were expected")
    components = np.concatenate([row["reward_components"] for row in rows], axis=1)
    fields: dict[str, Any] = {n: torch.from_numpy(np.concatenate([row[n] for row in rows])) for n in _PER_TOKEN}
    fields |= {name: torch.tensor([row[name] for row in rows]) for name in _PER_ROW}
    return Batch(
        reward_components=torch.from_numpy(components),
        reward_names=context.reward_names,
        env_names=context.env_names,
        kept=of_rows([row for t, _ in ordered for row in t.rows]),
        taught=of_groups([t for t, _ in ordered], scores, words),
        **fields,
    )


def hinted(batch: Batch, trajectories: Sequence[Trajectory], groups: Sequence[int], hints_of: HintsOf | None) -> Batch:
    """The batch that `flatten` made of these, with what a teacher is shown of each trajectory; None: nothing."""
    if hints_of is None:
        return batch
    ordered = [t for t, _ in _in_order(trajectories, groups, [1.0] * len(trajectories))]
    return replace(batch, hints=of_trajectories(ordered, hints_of))


@dataclass(frozen=True, slots=True)
class _Context:
    """The inputs of a row's fields besides its trajectory."""

    place_of_group: Mapping[int, int]
    reward_names: tuple[str, ...]
    env_names: tuple[str, ...]
    oldest: int | None
    greedy_baseline: bool
    loss_weights: Mapping[int, float]


def _in_order(
    trajectories: Sequence[Trajectory], groups: Sequence[int], weights: Sequence[float]
) -> list[tuple[Trajectory, float]]:
    """Trajectories with their weights, by the place of the group and the index in it."""
    place = {group: i for i, group in enumerate(groups)}
    foreign = [t.id for t in trajectories if t.id.group not in place]
    if foreign:
        raise ValueError(f"trajectory {foreign[0]} is in none of the batch's groups {list(groups)}")
    weighted = zip(trajectories, weights, strict=True)
    return sorted(weighted, key=lambda pair: (place[pair[0].id.group], pair[0].id.index))


def _row(context: _Context, episode: int, t: Trajectory, weight: float, row: Row) -> dict[str, Any]:
    """Every field of a row of trajectory `t`, the batch's `episode`, by its name in Batch."""
    if row.mask[0]:
        raise ValueError(f"trajectory {t.id}: a row begins with a sampled token; a prompt must come before it")
    greedy = context.greedy_baseline and t.id.index == 0
    versions = row.versions.astype(np.int64)
    carries_loss = np.zeros_like(row.mask) if greedy else recorded(row)
    if context.oldest is not None:
        carries_loss = carries_loss & (versions >= context.oldest)
    named = [_rewards(t, row, t.rewards.get(name, 0.0)) for name in context.reward_names]
    return {
        "token_ids": row.token_ids.astype(np.int64),
        "mask": carries_loss,
        "behaviour": row.logprobs,
        "versions": versions,
        "rewards": _rewards(t, row, t.reward),
        "reward_components": np.stack(named),
        "lengths": len(row),
        "groups": context.place_of_group[t.id.group],
        "episodes": episode,
        "row_weights": float(weight),
        "loss_weights": context.loss_weights.get(t.id.group, 1.0),
        "replayed": t.id.group in context.loss_weights,
        "turns": t.turns,
        "truncated": t.stop_reason in _TRUNCATED,
        "greedy": greedy,
        "envs": context.env_names.index(t.env),
    }


def _rewards(t: Trajectory, row: Row, reward: float) -> Float32:
    """[T] of the row: the reward on the last policy token of the trajectory's last row with one, 0 elsewhere."""
    rewards = np.zeros(len(row), np.float32)
    if row is [r for r in t.rows if r.mask.any()][-1]:
        rewards[np.flatnonzero(row.mask)[-1]] = reward
    return rewards
