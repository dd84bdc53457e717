"""The learner's mathematics again, slowly: float64, python loops over rows and tokens, nothing shared with asyncrl.

A batch is lists of rows; a row is lists of tokens; everything is plain floats. Corrections and objectives are in
`reference_objectives.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class Batch:
    """Rows of one flat batch, cut by hand."""

    lengths: list[int]
    groups: list[int]
    episodes: list[int]
    mask: list[bool]
    token: dict[str, list[float]] = field(default_factory=dict)

    def cut(self, flat: list) -> list[list]:
        rows, at = [], 0
        for n in self.lengths:
            rows.append(flat[at : at + n])
            at += n
        return rows

    @property
    def rows(self) -> list[list[int]]:
        """For each row, the flat indices of its policy tokens."""
        return [[i for i in row if self.mask[i]] for row in self.cut(list(range(len(self.mask))))]

    @property
    def all_rows(self) -> list[list[int]]:
        return self.cut(list(range(len(self.mask))))

    def episode_members(self) -> dict[int, list[int]]:
        members: dict[int, list[int]] = {}
        for b, e in enumerate(self.episodes):
            members.setdefault(e, []).append(b)
        return members

    def episode_tokens(self) -> dict[int, list[int]]:
        return {e: [i for b in bs for i in self.rows[b]] for e, bs in self.episode_members().items()}

    def episode_reward(self, rewards: list[float]) -> dict[int, float]:
        return {e: sum(rewards[i] for b in bs for i in self.all_rows[b]) for e, bs in self.episode_members().items()}

    def group_members(self) -> dict[int, list[int]]:
        members: dict[int, list[int]] = {}
        for e, bs in self.episode_members().items():
            members.setdefault(self.groups[bs[0]], []).append(e)
        return members

    def spread(self, value: dict[int, float]) -> list[float]:
        out = [0.0] * len(self.mask)
        for e, tokens in self.episode_tokens().items():
            for i in tokens:
                out[i] = value[e]
        return out


def mean(x: list[float]) -> float:
    return sum(x) / len(x)


def std(x: list[float]) -> float:
    return math.sqrt(sum((v - mean(x)) ** 2 for v in x) / (len(x) - 1)) if len(x) > 1 else 0.0


def bound(x: float) -> float:
    return min(max(x, -20.0), 20.0)


def whiten(x: list[float], mask: list[bool]) -> list[float]:
    inside = [v for v, m in zip(x, mask, strict=True) if m]
    if not inside:
        return [0.0] * len(x)
    var = sum((v - mean(inside)) ** 2 for v in inside) / max(len(inside) - 1, 1)
    return [(v - mean(inside)) / math.sqrt(var + 1e-8) if m else 0.0 for v, m in zip(x, mask, strict=True)]


def group_relative(batch: Batch, rewards: list[float], name: str, **o: object) -> list[float]:
    reward = batch.episode_reward(rewards)
    tokens = {e: len(t) for e, t in batch.episode_tokens().items()}
    value: dict[int, float] = {}
    nonzero = max(sum(r != 0 for r in reward.values()), 1)
    for members in batch.group_members().values():
        rs = [reward[e] for e in members]
        for e in members:
            others = [reward[j] for j in members if j != e]
            r = reward[e]
            if len(members) == 1 or max(rs) == min(rs):
                value[e] = 0.0
            elif name == "grpo":
                value[e] = (r - mean(rs)) / (std(rs) + 1e-6)
            elif name == "grpo_leave_one_out_mean":
                value[e] = (r - mean(others)) / (std(rs) + 1e-6)
            elif name == "grpo_leave_one_out":
                s = 0.0 if max(others) == min(others) else std(others)
                value[e] = (r - mean(others)) / (s + 1e-6) if s > 0 else r - mean(others)
            elif name == "grpo_batch_std":
                value[e] = (r - mean(rs)) / (std(list(reward.values())) + 1e-6)
            elif name == "dr_grpo":
                value[e] = r - mean(rs)
            elif name == "rloo":
                value[e] = r - mean(others)
            elif name == "opo":
                total = sum(tokens[j] for j in members)
                value[e] = r - (sum(tokens[j] * reward[j] for j in members) / total if total else 0.0)
            elif name == "gpg":
                value[e] = len(reward) / nonzero * (r - mean(rs))
            elif name == "grpo_passk":
                first, second = sorted(rs, reverse=True)[:2]
                value[e] = (first - second) / (std(rs) + 1e-6) if r == first else 0.0
            elif name == "max_rl":
                value[e] = (r - mean(rs)) / mean(rs) if mean(rs) > 0 else 0.0
            elif name == "max_rl_eps":
                value[e] = (r - mean(rs)) / (mean(rs) + 1e-6)
            else:
                raise KeyError(name)
    return batch.spread(value)


def reinforce_pp_baseline(batch: Batch, rewards: list[float]) -> list[float]:
    return whiten(group_relative(batch, rewards, "dr_grpo"), batch.mask)


def gdpo(batch: Batch, components: list[list[float]], weights: list[float], variant: str) -> list[float]:
    parts = [group_relative(batch, c, "grpo") for c in components]
    total = [sum(w * p[i] for w, p in zip(weights, parts, strict=True)) for i in range(len(batch.mask))]
    if variant == "token":
        return whiten(total, batch.mask)
    of_episode = {}
    for e, bs in batch.episode_members().items():  # an episode without tokens still has a value: compute it anew
        probe = Batch([max(n, 1) for n in batch.lengths], batch.groups, batch.episodes, [], {})
        probe.mask = [True] * sum(probe.lengths)
        value = 0.0
        for w, c in zip(weights, components, strict=True):
            rows, padded = batch.cut(c), []
            for row in rows:
                padded += row or [0.0]
            value += w * group_relative(probe, padded, "grpo")[sum(probe.lengths[: bs[0]])]
        of_episode[e] = value
    xs = list(of_episode.values())
    s = std(xs)
    return batch.spread({e: (v - mean(xs)) / s if s > 0 else 0.0 for e, v in of_episode.items()})


def gae(batch, rewards, values, gamma=1.0, lam=1.0, lam_of_length=None):
    adv, ret = [0.0] * len(batch.mask), [0.0] * len(batch.mask)
    for tokens in batch.episode_tokens().values():
        lam_here = lam if lam_of_length is None else lam_of_length(len(tokens))
        a, v_next = 0.0, 0.0
        for i in reversed(tokens):
            a = rewards[i] + gamma * v_next - values[i] + gamma * lam_here * a
            v_next = values[i]
            adv[i], ret[i] = a, a + values[i]
    return adv, ret


def vtrace(batch, rewards, values, current, behaviour, gamma, rho_max, c_max):
    adv, ret = [0.0] * len(batch.mask), [0.0] * len(batch.mask)
    for tokens in batch.episode_tokens().values():
        target, v_next = 0.0, 0.0
        for i in reversed(tokens):
            ratio = math.exp(bound(current[i] - behaviour[i]))
            rho, c = min(ratio, rho_max), min(ratio, c_max)
            adv[i] = rho * (rewards[i] + gamma * target - values[i])
            target = values[i] + rho * (rewards[i] + gamma * v_next - values[i]) + gamma * c * (target - v_next)
            v_next = values[i]
            ret[i] = target
    return adv, ret


def returns(batch, rewards, gamma, reset=False):
    out = [0.0] * len(batch.mask)
    for tokens in batch.episode_tokens().values():
        g, later = 0.0, None
        for i in reversed(tokens):
            if reset and later is not None and later != i + 1:
                g = 0.0
            g = rewards[i] + gamma * g
            out[i], later = g, i
    return out


def returns_by_position(batch, rewards, gamma):
    """Discounted over every position of a row, context too; from one row of an episode to the next once."""
    out, row_of = [0.0] * len(batch.mask), {i: b for b, row in enumerate(batch.all_rows) for i in row}
    for tokens in batch.episode_tokens().values():
        g, later = 0.0, None
        for i in reversed(tokens):
            steps = 0 if later is None else later - i if row_of[later] == row_of[i] else 1
            for _ in range(steps):
                g *= gamma
            g += rewards[i]
            out[i], later = g, i
    return out


def optimal_token_baseline(batch, rewards, logprobs, sum_pi_sq, variant, weights=None, zero_tail=True):
    g = returns(batch, rewards, 1.0)
    reward, tokens = batch.episode_reward(rewards), batch.episode_tokens()
    running, place = {}, {}
    for ts in tokens.values():
        total = 0.0
        for n, i in enumerate(ts):
            norm = 1 - 2 * math.exp(logprobs[i]) + sum_pi_sq[i]
            total += norm * (weights[i] ** 2 if weights else 1.0)
            running[i], place[i] = total, (n if variant == "token" else i - ts[0])
    out = [0.0] * len(batch.mask)
    for members in batch.group_members().values():
        rs = [reward[e] for e in members]
        if len(members) == 1 or max(rs) == min(rs):
            continue
        sizes = sorted((len(tokens[e]) for e in members), reverse=True)
        for e in members:
            for i in tokens[e]:
                same = [j for o in members for j in tokens[o] if place[j] == place[i]]
                b = sum(g[j] * running[j] for j in same) / (sum(running[j] for j in same) + 1e-8)
                if zero_tail and len(tokens[e]) == sizes[0] > sizes[1] and place[i] >= sizes[1]:
                    b = 0.0
                out[i] = g[i] - b
    return out, g


def aggregate(batch: Batch, name: str, per_token: list[float], rows: str = "nonempty", norm: float = 1.0) -> float:
    units: dict[int, list[int]]
    if name == "prompt_mean":
        units = {}
        for b, g in enumerate(batch.groups):
            units.setdefault(g, []).extend(batch.rows[b])
    else:
        units = batch.episode_tokens()
    full = [t for t in units.values() if t]
    inside = [i for t in full for i in t]
    if not inside:
        return 0.0
    if name == "token_mean":
        return mean([per_token[i] for i in inside])
    count = {"nonempty": len(full), "all": len(units), "none": 1}[rows]
    if name in ("seq_mean_token_mean", "prompt_mean"):
        return sum(mean([per_token[i] for i in t]) for t in full) / count
    return sum(per_token[i] for i in inside) / count / norm
