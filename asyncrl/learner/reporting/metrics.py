"""The metrics of a training step, named as in asyncrl/tracking/series.py."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from asyncrl.learner.batch import Batch
from asyncrl.learner.losses.value import explained_variance
from asyncrl.learner.objective.objective import Objective
from asyncrl.learner.ragged import clamped_exp, log_ratio, masked_mean, share
from asyncrl.learner.step.diagnostics import engine_mismatch, mismatch, off_policy, sequence_effective_sample_size
from asyncrl.learner.step.record import Record
from asyncrl.learner.step.teacher import teacher_metrics
from asyncrl.learner.step.train_step import StepResult
from asyncrl.tracking.series import BUCKET_EDGES, STOP_REASONS, histogram
from asyncrl.trajectory import Trajectory, succeeded


def step_metrics(
    objective: Objective,
    batch: Batch,
    trajectories: Sequence[Trajectory],
    result: StepResult,
    *,
    version: int,
    success: str,
) -> dict[str, float]:
    """`trajectories`: those of its new groups. `version`: the learner's before the step; staleness counts from it.
    `success`: the reward that tells success."""
    record, mask = result.record, batch.mask
    staleness = version - batch.versions
    log_w = log_ratio(record.proximal, batch.behaviour, mask)
    ratio = clamped_exp(log_w)
    values = {
        "throughput/compute_s": result.compute_s,
        "throughput/proximal_s": record.proximal_s,
        "throughput/real_token_share": 1.0,
        "weights/loss": record.loss,
        "weights/policy_loss": record.policy_loss,
        "weights/grad_norm": record.grad_norms[-1],
        "weights/lr": record.lr,
        "weights/lr_scale": record.lr_scale,
        "weights/without_gradient": record.steps_without_gradient,
        "weights/entropy": float(masked_mean(record.entropy, mask)),
        "weights/reference_kl": float(masked_mean(record.reference_kl, mask)),
        "correction/weights_mean": float(masked_mean(record.weights, mask)),
        "correction/sequence_ess": float(
            sequence_effective_sample_size(record.proximal, batch.behaviour, mask, batch.lengths)
        ),
        "correction/kept": float(share(record.keep, mask)),
        "correction/ratio_mean": float(masked_mean(ratio, mask)),
        "correction/ratio_p99": float(_quantile(ratio[mask], 0.99)),
        "correction/approx_kl": float(mismatch(record.current, record.anchor, mask)["mismatch_kl"]),
    }
    if mask.any():
        values["staleness/mean"] = float(staleness[mask].float().mean())
        values["staleness/max"] = float(staleness[mask].max())
        values["reward/advantage_std"] = float(record.advantages[mask].std(correction=0))
    by_bucket = off_policy(
        record.weights,
        record.proximal,
        batch.behaviour,
        mask,
        staleness=staleness,
        clipped=record.clipped,
        buckets=BUCKET_EDGES,
    )
    values |= histogram("staleness/trained_tokens", {})
    for name, value in by_bucket.items():
        part, _, what = name.rpartition("/")
        of_bucket = part.removeprefix("staleness_")
        if what == "tokens":
            values[f"staleness/trained_tokens/{of_bucket}"] = float(value / mask.sum())
        else:
            values[f"correction/{what}/{of_bucket}".rstrip("/")] = float(value)
    differences = engine_mismatch(record.proximal, batch.behaviour, mask, staleness)
    values |= {f"correction/{name}": float(value) for name, value in differences.items()}
    of_objective = objective.metrics(batch, record.advantages, record.current, record.anchor, torch.Generator())
    of_teacher = teacher_metrics(record, batch, objective.teacher.over)
    values |= of_objective | of_teacher | _of_companions(record, mask)
    return values | _kept(trajectories) | _rewards(trajectories, success)


def _kept(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Metrics of truncated sampling; none without it."""
    counts = [row.kept.counts for t in trajectories for row in t.rows if row.kept is not None]
    tokens = sum(map(len, counts))
    if not tokens:
        return {}
    beyond = sum(int((of_row == 0).sum()) for of_row in counts)
    ids = sum(int(of_row.sum(dtype="int64")) for of_row in counts)
    return {
        "correction/beyond_max_kept": float(beyond),
        "correction/kept_ids": ids / max(tokens - beyond, 1),
    }


def _of_companions(record: Record, mask: Tensor) -> dict[str, float]:
    """Metrics of the critic, the KL term's weight and the shaping, where there are any."""
    values = {} if record.kl_coef == 0 else {"weights/kl_coef": record.kl_coef}
    if record.shaped_reward is not None:
        values["reward/shaped"] = record.shaped_reward
    if record.values is None:
        return values
    return values | {
        "weights/value_loss": record.value_loss,
        "weights/explained_variance": explained_variance(record.values, record.returns, mask),
        "weights/value_mean": float(masked_mean(record.values, mask)),
        "weights/critic_grad_norm": record.critic_grad_norms[-1],
    }


def _quantile(x: Tensor, q: float) -> Tensor:
    """The smallest value that at least the share q is at or below; torch.quantile refuses large inputs."""
    if not len(x):
        return x.new_ones(())
    return x.kthvalue(math.ceil(q * len(x)))[0]


def _rewards(trajectories: Sequence[Trajectory], success: str) -> dict[str, float]:
    rewards = [t.reward for t in trajectories]
    values = {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/turns": statistics.fmean(t.turns for t in trajectories),
        "reward/length": statistics.fmean(t.num_policy_tokens for t in trajectories),
        "reward/truncated": statistics.fmean(
            t.stop_reason in ("max_turns", "max_tokens", "length") for t in trajectories
        ),
        "staleness/versions_per_episode": statistics.fmean(_versions(t) for t in trajectories),
    }
    stops: Counter[str] = Counter(t.stop_reason for t in trajectories)
    values |= {f"reward/stopped/{reason}": stops[reason] / len(trajectories) for reason in STOP_REASONS}
    groups: defaultdict[int, set[float]] = defaultdict(set)
    for t in trajectories:
        groups[t.id.group].add(t.reward)
    values["reward/zero_variance_groups"] = statistics.fmean(len(distinct) == 1 for distinct in groups.values())
    values["reward/success"] = _success(trajectories, success)
    return values | _rewards_by_name(trajectories) | _rewards_by_env(trajectories, success)


def _rewards_by_name(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for name, value in (part for t in trajectories for part in t.rewards.items()):
        by_name[name].append(value)
    return {f"reward/by_name/{name}": statistics.fmean(rewards) for name, rewards in by_name.items()}


def _rewards_by_env(trajectories: Sequence[Trajectory], success: str) -> dict[str, float]:
    by_env: defaultdict[str, list[Trajectory]] = defaultdict(list)
    for t in trajectories:
        by_env[t.env].append(t)
    means = {f"reward/mean/{env}": statistics.fmean(t.reward for t in played) for env, played in by_env.items()}
    return means | {f"reward/success/{env}": _success(played, success) for env, played in by_env.items()}


def _success(trajectories: Sequence[Trajectory], name: str) -> float:
    return statistics.fmean(succeeded(t.reward, t.rewards, name) for t in trajectories)


def _versions(t: Trajectory) -> int:
    return len({int(v) for row in t.rows for v in set(row.versions[row.mask].tolist())})
