"""Estimators by turn again, slowly: float64, python loops over episodes and turns, nothing shared with asyncrl.

`verl_agent_*` and `ragen_*` are the formulas of those systems (langfengQ/verl-agent `gigpo/core_gigpo.py`;
RAGEN `ragen/trainer/core_algos.py`), on rows as they lay them out, to hold ours against.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tests.learner.reference import Batch, mean, std


@dataclass
class Turn:
    episode: int
    group: int
    number: int
    tokens: list[int]
    reward: float
    state: int


def turns(
    batch: Batch, turn_of: list[int], rewards: list[float], states: list[int] | None = None
) -> dict[int, list[Turn]]:
    """The turns of each episode in the order of their numbers."""
    found: dict[int, list[Turn]] = {}
    for episode, tokens in batch.episode_tokens().items():
        group = batch.groups[batch.episodes.index(episode)]
        numbers = sorted({turn_of[i] for i in tokens})
        found[episode] = []
        for number in numbers:
            mine = [i for i in tokens if turn_of[i] == number]
            state = -1 if states is None else states[mine[0]]
            found[episode].append(Turn(episode, group, number, mine, sum(rewards[i] for i in mine), state))
    return found


def returns(episode: list[Turn], gamma: float) -> list[float]:
    g, out = 0.0, []
    for turn in reversed(episode):
        g = turn.reward + gamma * g
        out.append(g)
    return out[::-1]


def on_tokens(batch: Batch, value: list[tuple[Turn, float]]) -> list[float]:
    out = [0.0] * len(batch.mask)
    for turn, x in value:
        for i in turn.tokens:
            out[i] = x
    return out


def turn_returns(batch: Batch, by: dict[int, list[Turn]], gamma: float) -> list[float]:
    pairs = [pair for episode in by.values() for pair in zip(episode, returns(episode, gamma), strict=True)]
    return on_tokens(batch, pairs)


def compared(x: float, others: list[float], scale_by_std: bool = True, eps: float = 1e-6) -> float:
    """`others` include x; 0 where there is nothing to compare, or all are equal."""
    if len(others) == 1 or max(others) == min(others):
        return 0.0
    return (x - mean(others)) / ((std(others) + eps) if scale_by_std else 1.0)


def turn_grpo(batch: Batch, by: dict[int, list[Turn]], gamma: float, scale_by_std: bool, process: bool) -> list[float]:
    value: list[tuple[Turn, float]] = []
    for episode in by.values():
        if process:
            normal = []
            for turn in episode:
                all_rewards = [t.reward for e in by.values() for t in e if t.group == turn.group]
                normal.append(compared(turn.reward, all_rewards, scale_by_std))
            for k, turn in enumerate(episode):
                value.append((turn, sum(gamma**j * x for j, x in enumerate(normal[k:]))))
            continue
        for turn, g in zip(episode, returns(episode, gamma), strict=True):
            same = [
                theirs
                for e in by.values()
                for other, theirs in zip(e, returns(e, gamma), strict=True)
                if (other.group, other.number) == (turn.group, turn.number)
            ]
            value.append((turn, compared(g, same, scale_by_std)))
    return on_tokens(batch, value)


def turn_gae(
    batch: Batch, by: dict[int, list[Turn]], values: list[float], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """The sum of GAE written out, instead of its recursion: A[k] = sum over j >= k of (gamma lam)^(j-k) delta[j]."""
    advantages, targets = [], []
    for episode in by.values():
        v = [values[turn.tokens[0]] for turn in episode]
        delta = [
            turn.reward + (gamma * v[k + 1] if k + 1 < len(episode) else 0.0) - v[k] for k, turn in enumerate(episode)
        ]
        for k, turn in enumerate(episode):
            a = sum((gamma * lam) ** (j - k) * delta[j] for j in range(k, len(episode)))
            advantages.append((turn, a))
            targets.append((turn, a + v[k]))
    return on_tokens(batch, advantages), on_tokens(batch, targets)


def gigpo(
    batch: Batch,
    by: dict[int, list[Turn]],
    reward: dict[int, float],
    omega: float,
    gamma: float,
    scale_by_std: bool,
    per_turn: bool,
) -> list[float]:
    """2505.10978, equations 3, 6, 7 and 8. `reward`: of each episode."""
    group_of = {e: batch.groups[batch.episodes.index(e)] for e in by}
    value = []
    for e, episode in by.items():
        for turn, g in zip(episode, returns(episode, gamma), strict=True):
            siblings = [j for j in by if group_of[j] == group_of[e]]
            rs = [reward[j] for j in siblings for _ in (by[j] if per_turn else [0])]
            anchored = [
                theirs
                for j in siblings
                for other, theirs in zip(by[j], returns(by[j], gamma), strict=True)
                if other.state == turn.state and (turn.state >= 0 or other is turn)
            ]
            value.append((turn, compared(reward[e], rs, scale_by_std) + omega * compared(g, anchored, scale_by_std)))
    return on_tokens(batch, value)


def verl_agent_gigpo(
    episode_rewards: list[float],
    step_returns: list[float],
    observations: list[str],
    index: list[int],
    trajectory: list[int],
    omega: float,
    remove_std: bool,
    across_rows: bool,
) -> list[float]:
    """verl-agent's joint advantage of each row; a row is one turn. Its mean and std of a lone value are 0 and 1 in the
    episode part, and the value and 1 in the step part; it divides by std + 1e-6 even where all are equal."""

    def normal(x: float, xs: list[float]) -> float:
        s = math.sqrt(sum((v - mean(xs)) ** 2 for v in xs) / (len(xs) - 1))
        return x - mean(xs) if remove_std else (x - mean(xs)) / (s + 1e-6)

    rows = range(len(index))
    out = []
    for i in rows:
        seen: set[tuple[int, int]] = set()
        scores = []
        for j in rows:
            if index[j] == index[i] and (index[j], trajectory[j]) not in seen:
                scores.append(episode_rewards[j])
                if not across_rows:
                    seen.add((index[j], trajectory[j]))
        episode = episode_rewards[i] if len(scores) == 1 else normal(episode_rewards[i], scores)
        same = [step_returns[j] for j in rows if (index[j], observations[j]) == (index[i], observations[i])]
        step = 0.0 if len(same) == 1 else normal(step_returns[i], same)
        out.append(episode + omega * step)
    return out


def ragen_bi_level(
    rewards: list[float], values: list[float], mask: list[bool], gamma: float, lam: float, high_level_gamma: float
) -> tuple[list[float], list[float]]:
    """RAGEN's bi-level GAE of one row, before it whitens. The ends of turns are the tokens whose reward is not 0."""
    reward = list(rewards)
    ends = [i for i, r in enumerate(rewards) if r != 0]
    carried, advantage = 0.0, {}
    for at in reversed(range(len(ends))):
        i = ends[at]
        following = values[ends[at + 1]] if at + 1 < len(ends) else 0.0
        carried = rewards[i] + high_level_gamma * following - values[i] + high_level_gamma * lam * carried
        advantage[i] = carried
    for i in ends:
        reward[i] = advantage[i] + values[i]
    out, targets = [0.0] * len(mask), [0.0] * len(mask)
    valid = [i for i, m in enumerate(mask) if m]
    carried = 0.0
    for at in reversed(range(len(valid))):
        i = valid[at]
        following = values[valid[at + 1]] if i not in ends else 0.0
        carried = reward[i] + gamma * following - values[i] + (0.0 if i in ends else gamma * lam * carried)
        out[i], targets[i] = carried, carried + values[i]
    return out, targets
