"""The metrics of demonstrations, named as in asyncrl/tracking/series.py."""

from __future__ import annotations

from asyncrl.learner.batch import Batch
from asyncrl.learner.ragged import masked_mean
from asyncrl.learner.step.train_step import StepResult


def supervised_metrics(batch: Batch, result: StepResult) -> dict[str, float]:
    """Series of a step on demonstrations alone: no rewards, no staleness, no corrections."""
    record, mask = result.record, batch.mask
    return {
        "throughput/compute_s": result.compute_s,
        "throughput/real_token_share": 1.0,
        "weights/loss": record.loss,
        "weights/grad_norm": record.grad_norms[-1],
        "weights/lr": record.lr,
        "weights/without_gradient": record.steps_without_gradient,
        "weights/entropy": float(masked_mean(record.entropy, mask)),
        "weights/demonstrations/loss": float(masked_mean(-record.current, mask)),
        "weights/demonstrations/tokens": float(mask.sum()),
        "weights/demonstrations/longest": float(batch.lengths.max()),
    }


def metrics_beside(batch: Batch, result: StepResult) -> dict[str, float]:
    """Series of the demonstrations beside a step's groups; empty where there are none."""
    record, shown = result.record, batch.demonstrations
    if shown is None or not record.shown_tokens:
        return {}
    return {
        "weights/demonstrations/loss": record.shown_nats / record.shown_tokens,
        "weights/demonstrations/tokens": float(record.shown_tokens),
        "weights/demonstrations/longest": float(shown.lengths.max()),
        "weights/demonstrations/weight": record.shown_weight,
    }
