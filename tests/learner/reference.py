"""The learner's mathematics again, slowly: float64, python loops over rows and tokens, nothing shared with asyncrl.

A batch is lists of rows; a row is lists of tokens. Advantages and corrections are plain floats. Objectives loop over
scalar tensors, so that autograd, with every `.detach()` written where the paper has a stop-gradient, gives gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


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


# ---------------------------------------------------------------- advantages, one number an episode


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


# ---------------------------------------------------------------- advantages, a number a token


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


# ---------------------------------------------------------------- corrections


def log_w(batch: Batch, proximal: list[float], behaviour: list[float]) -> list[list[float]]:
    return [[proximal[i] - behaviour[i] for i in row] for row in batch.rows]


def correction(batch: Batch, proximal, behaviour, name, **o):
    """(weights[T], keep[T])"""
    weights, keep = [0.0] * len(batch.mask), [False] * len(batch.mask)
    for tokens in batch.rows:
        lw = [proximal[i] - behaviour[i] for i in tokens]
        if not lw:
            continue
        of_sum, of_mean = math.exp(bound(sum(lw))), math.exp(bound(mean(lw)))
        for i, x in zip(tokens, lw, strict=True):
            w = math.exp(bound(x))
            ratio = (
                {"token": w, "sequence": of_sum, "geometric": of_mean}[o.get("level", "token")]
                if name in ("tis", "mis")
                else w
            )
            if name == "none":
                weights[i], keep[i] = 1.0, True
            elif name == "tis":
                weights[i], keep[i] = min(ratio, o["cap"]), True
            elif name == "mis":
                keep[i] = o["low"] <= ratio <= o["high"]
                kept = (w if o.get("weight") == "token" else ratio) if o.get("use_weight", True) else 1.0
                weights[i] = kept if keep[i] else 0.0
            elif name == "icepop":
                keep[i] = o["low"] <= w <= o["high"]
                weights[i] = w if keep[i] else 0.0
            elif name == "clamp":
                weights[i], keep[i] = min(max(w, o["low"]), o["high"]), True
            elif name == "veto":
                keep[i] = all(o["low"] <= math.exp(bound(y)) <= o["high"] for y in lw)
                weights[i] = float(keep[i])
            elif name == "kl_reject":
                est = [{"k1": -y, "k2": y * y / 2, "k3": math.exp(bound(y)) - 1 - y}[o["kind"]] for y in lw]
                stat = {"token": est[tokens.index(i)], "seq_sum": sum(est), "seq_mean": mean(est), "seq_max": max(est)}
                keep[i] = o["low"] <= stat[o["level"]] <= o["high"]
                weights[i] = float(keep[i])
            else:
                raise KeyError(name)
    return weights, keep


def opsm(batch, reference, current, advantages, delta, variant):
    keep = [False] * len(batch.mask)
    for tokens in batch.rows:
        for i in tokens:
            a = advantages[i] if variant == "token" else mean([advantages[j] for j in tokens])
            keep[i] = not (a < 0 and mean([reference[j] - current[j] for j in tokens]) > delta)
    return keep


def m2po_paper(batch, behaviour, current, advantages, tau):
    x = {i: current[i] - behaviour[i] for row in batch.rows for i in row}
    inside = [i for i in x if (advantages[i] > 0 and x[i] > 0) or (advantages[i] < 0 and x[i] < 0)]
    while inside and mean([x[i] ** 2 for i in inside]) > tau:
        inside.remove(max(inside, key=lambda i: x[i] ** 2))
    concerned = {i for i in x if (advantages[i] > 0 and x[i] > 0) or (advantages[i] < 0 and x[i] < 0)}
    return [m and (i not in concerned or i in inside) for i, m in enumerate(batch.mask)]


def m2po_all(batch, proximal, behaviour, tau):
    inside = [i for row in batch.rows for i in row]
    while len(inside) > 1 and not mean([(behaviour[i] - proximal[i]) ** 2 for i in inside]) < tau:
        inside.remove(max(inside, key=lambda i: (behaviour[i] - proximal[i]) ** 2))
    return [i in inside for i in range(len(batch.mask))]


def m2po_cap(batch, behaviour, current, advantages, tau):
    x = {i: current[i] - behaviour[i] for row in batch.rows for i in row}
    inside = [i for i in x if (advantages[i] > 0 and x[i] > 0) or (advantages[i] < 0 and x[i] < 0)]
    c = math.inf
    if inside and mean([x[i] ** 2 for i in inside]) > tau:
        low, high = 0.0, max(abs(x[i]) for i in inside)
        for _ in range(200):  # bisection
            c = (low + high) / 2
            low, high = (c, high) if mean([min(abs(x[i]), c) ** 2 for i in inside]) <= tau else (low, c)
    down, up = 1 - max(0.3, 1 - math.exp(-c)), 1 + max(0.5, math.exp(c) - 1)
    return [m and not (i in inside and not down <= math.exp(bound(x[i])) <= up) for i, m in enumerate(batch.mask)]


# ---------------------------------------------------------------- objectives


def objective(
    batch: Batch, name: str, current: Tensor, proximal, advantages, behaviour=None, weights=None, **o
) -> Tensor:
    """per_token[T] with the graph that the paper means."""
    out = [torch.zeros((), dtype=torch.float64) for _ in batch.mask]
    anchor = proximal if behaviour is None else behaviour
    inside = [i for row in batch.rows for i in row]
    mean_a = mean([advantages[i] for i in inside]) if inside else 0.0
    mean_l = mean([current[i].item() for i in inside]) if inside else 0.0
    cov = {i: (advantages[i] - mean_a) * (current[i].item() - mean_l) for i in inside}

    def e(x: Tensor) -> Tensor:
        return x.clamp(-20, 20).exp()

    for tokens in batch.rows:
        if not tokens:
            continue
        x = {i: current[i] - proximal[i] for i in tokens}
        mean_x = sum(x.values()) / len(tokens)
        row_a = mean([advantages[i] for i in tokens])
        for i in tokens:
            a, r, logp = advantages[i], e(x[i]), current[i]
            to_anchor = e(current[i] - anchor[i])
            if name in ("ppo", "decoupled_ppo"):
                free = r if o.get("delta") is None else r.clamp(max=o["delta"])
                loss = max(-a * free, -a * r.clamp(0.8, 1.28), key=torch.Tensor.item)
                if a < 0 and o.get("dual_clip", 3.0) is not None and loss.item() > -o.get("dual_clip", 3.0) * a:
                    loss = torch.zeros((), dtype=torch.float64) - o.get("dual_clip", 3.0) * a
                out[i] = loss * (weights[i] if name == "decoupled_ppo" else 1.0)
            elif name in ("gspo", "luspo"):
                s = e(mean_x)
                if o.get("variant") == "token":
                    s = e(mean_x.detach() + logp - logp.detach())
                a = row_a if o.get("row_advantage") else a
                out[i] = max(-a * s, -a * s.clamp(1 - 3e-4, 1 + 4e-4), key=torch.Tensor.item)
                out[i] = out[i] * (len(tokens) if name == "luspo" else 1)
            elif name == "gmpo":
                z = []
                for j in tokens:
                    sign = (advantages[j] > 0) - (advantages[j] < 0)
                    z.append(sign * min(sign * x[j], sign * x[j].clamp(-0.4, 0.4), key=torch.Tensor.item))
                out[i] = -row_a * e(sum(z) / len(tokens))
                if weights is not None:
                    out[i] = out[i] * math.exp(mean([math.log(weights[j] + 1e-10) for j in tokens]))
            elif name == "sapo":
                tau = 1.0 if a > 0 else 1.05
                out[i] = -a * 4 / tau / (1 + (-tau * (r - 1)).exp())
            elif name == "cispo":
                w = r.detach().clamp(0.0, 5.0) if o.get("variant") != "bound" else r.detach().clamp(max=o["clip_high"])
                out[i] = -w * a * logp
            elif name == "gpg":
                out[i] = -a * logp
            elif name == "reinforce":
                ratio = to_anchor
                if o.get("level") == "sequence":
                    ratio = e(sum(current[j] - anchor[j] for j in tokens))
                out[i] = -a * ratio if o.get("variant") == "ratio" else -ratio.detach().clamp(max=2.0) * a * logp
            elif name == "topr":
                ratio = to_anchor
                if o.get("variant") == "sequence":
                    ratio = e(sum(current[j] - anchor[j] for j in tokens))
                out[i] = -a * logp * (1.0 if a > 0 else ratio.detach().clamp(max=1.0))
            elif name == "rollout_is":
                out[i] = -a * logp * (to_anchor.detach() if 0.8 < to_anchor.item() < 1.28 else 0.0)
            elif name == "vespo":
                total = sum(bound(x[j].item()) for j in tokens)
                if weights is not None:
                    total += sum(math.log(max(weights[j], 1e-8)) for j in tokens)
                total = min(max(total, math.log(1e-8)), 20.0)
                k, lam = (2, 3) if a >= 0 else (3, 2)
                out[i] = -math.exp(lam + k * total - lam * math.exp(total)) * a * logp
            elif name == "dro":
                out[i] = -(a * logp - 0.5 * o["beta"] * (logp - proximal[i]) ** 2)
            elif name in ("dppo_tv", "dppo_kl"):
                p, q = math.exp(logp.item()), math.exp(behaviour[i])
                if name == "dppo_tv":
                    high, low = p - q <= 0.2, p - q >= -0.2
                else:
                    kl = q * (behaviour[i] - logp.item()) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
                    high, low = kl <= 0.2 or p <= q, kl <= 0.2 or p >= q
                keep = (high and low) if o.get("symmetric") else high if a > 0 else low
                w = to_anchor if o.get("variant") == "ratio" else to_anchor.detach().clamp(max=20.0) * logp
                out[i] = -a * w * float(keep) + o.get("kl_tau", 0.0) * (logp - behaviour[i]) ** 2
            elif name == "kl_cov":
                count = max(int(o["ratio"] * len(inside)), 1)
                held = sorted(inside, key=lambda j: cov[j], reverse=True)[:count]
                out[i] = -a * r + (0.1 * x[i].abs().clamp(max=math.inf) if i in held else 0.0)
            elif name == "clip_cov":  # without the random choice: `spared` says which
                loss = max(-a * r, -a * r.clamp(0.8, 1.2), key=torch.Tensor.item)
                out[i] = loss * 0.0 if i in o["spared"] else loss
            else:
                raise KeyError(name)
    return torch.stack(out) if out else torch.zeros(0, dtype=torch.float64)


def cov_candidates(batch: Batch, current: list[float], proximal: list[float], advantages: list[float]) -> list[int]:
    inside = [i for row in batch.rows for i in row]
    if not inside:
        return []
    ma, ml = mean([advantages[i] for i in inside]), mean([current[i] for i in inside])
    found = []
    for i in inside:
        r, a = math.exp(bound(current[i] - proximal[i])), advantages[i]
        clipped = -a * min(max(r, 0.8), 1.2) > -a * r
        if not clipped and 1.0 < (a - ma) * (current[i] - ml) < 5.0:
            found.append(i)
    return found


# ---------------------------------------------------------------- aggregation


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
