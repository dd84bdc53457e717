"""Corrections and objectives again, slowly.

Corrections are plain floats. Objectives loop over scalar tensors, so that autograd, with every `.detach()` written
where the paper has a stop-gradient, gives the gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.learner.reference import Batch, bound, mean


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
                sign = -1 if o.get("direction", "behaviour") == "behaviour" else 1
                est = [{"k1": sign * y, "k2": y * y / 2, "k3": math.exp(bound(y)) - 1 - y}[o["kind"]] for y in lw]
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
        candidates = [0.0, *(abs(x[i]) for i in inside)]
        c = max(c for c in candidates if mean([min(abs(x[i]), c) ** 2 for i in inside]) <= tau)
    down, up = 1 - max(0.3, 1 - math.exp(-c)), 1 + max(0.5, math.exp(c) - 1)
    return [m and not (i in inside and not down <= math.exp(bound(x[i])) <= up) for i, m in enumerate(batch.mask)]


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
                of_row = mean_x
                if o.get("mean_over") == "kept":
                    kept = [x[k] for k in tokens if weights[k] != 0]
                    of_row = sum(kept) / len(kept) if kept else torch.zeros((), dtype=torch.float64)
                s = e(of_row)
                if o.get("variant") == "token":
                    s = e(of_row.detach() + logp - logp.detach())
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
