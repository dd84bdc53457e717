"""What the terminal shows, as plain values: computed from the run's state, drawn by live.py."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncrl.tracking.advice import advice
from asyncrl.tracking.series import BUCKETS, DROP_REASONS, STATES
from asyncrl.tracking.state import GREEDY, SAMPLED, RoleState, RunState

PACE_STEPS = 20
"""Training steps whose pace gives the time left."""


@dataclass(frozen=True, slots=True)
class Waiting:
    cause: str
    on: str
    """The process or thing that it waits for; may be empty."""
    for_s: float


@dataclass(frozen=True, slots=True)
class RoleView:
    role: str
    ready: bool
    waiting: Waiting | None
    shares: tuple[tuple[str, float], ...]
    """Share of the run's time so far by cause, largest first."""
    cpu: float | None
    """CPU use, in cores."""
    rss_bytes: float | None
    restarts: int


@dataclass(frozen=True, slots=True)
class View:
    name: str
    step: int
    steps: int
    wall_s: float
    left_s: float | None
    """None until the pace is known."""
    rewards: tuple[float, ...] = ()
    """Mean reward per training step, oldest first."""
    success: float | None = None
    held_out: tuple[tuple[int, float | None, float | None], ...] = ()
    """(step, sampled, greedy) of each evaluation."""
    generated_per_s: float | None = None
    """None: not reported yet; a rate needs two reports."""
    trained_per_s: float | None = None
    generated: float = 0.0
    trained: float = 0.0
    staleness_mean: float | None = None
    staleness_max: float | None = None
    bound: int = 0
    histogram: tuple[float, ...] = ()
    """Share of the last step's trained tokens, per bucket of series.BUCKETS."""
    ess: float | None = None
    fill: float | None = None
    groups: dict[str, float] = field(default_factory=dict)
    """Groups by state."""
    dropped: dict[str, float] = field(default_factory=dict)
    """Groups, by reason; only those above 0."""
    roles: tuple[RoleView, ...] = ()
    advice: str = ""
    """What would make it faster; empty where the record does not say."""


def view(run_state: RunState, name: str, now: float) -> View:
    values = run_state.last | run_state.now(now)
    training = [r for r in run_state.recent if "weights/loss" in r]
    return View(
        name=name,
        step=run_state.step,
        steps=run_state.steps,
        wall_s=now - run_state.started,
        left_s=left_s([(r["step"], r["wall_s"]) for r in training], run_state.steps, now - run_state.started),
        rewards=tuple(r["reward/mean"] for r in training if "reward/mean" in r),
        success=training[-1].get("reward/success") if training else None,
        held_out=tuple((int(r["step"]), r.get(SAMPLED), r.get(GREEDY)) for r in run_state.held_out),
        generated_per_s=values.get("throughput/tokens_generated_per_s"),
        trained_per_s=values.get("throughput/tokens_trained_per_s"),
        generated=values.get("throughput/tokens_generated", 0.0),
        trained=values.get("throughput/tokens_trained", 0.0),
        staleness_mean=training[-1].get("staleness/mean") if training else None,
        staleness_max=training[-1].get("staleness/max") if training else None,
        bound=int(run_state.last.get("staleness/bound", run_state.max_staleness)),
        histogram=tuple(training[-1].get(f"staleness/trained_tokens/{b}", 0.0) for b in BUCKETS) if training else (),
        ess=training[-1].get("correction/ess") if training else None,
        fill=values.get("buffer/fill"),
        groups={s: values[f"buffer/groups/{s}"] for s in STATES if f"buffer/groups/{s}" in values},
        dropped={r: n for r in DROP_REASONS if (n := values.get(f"buffer/dropped/{r}", 0.0)) > 0},
        roles=tuple(
            _role(run_state, state, values, now)
            for role, state in sorted(run_state.roles.items())
            if role != "launcher" and not state.over
        ),
        advice=advice(training, os.cpu_count()),
    )


def left_s(pace: Sequence[tuple[float, float]], steps: int, wall_s: float) -> float | None:
    """Seconds until the last training step. `pace`: (step, wall_s) of the records so far.

    >>> left_s([(1, 10.0), (2, 12.0), (3, 14.0)], steps=10, wall_s=15.0)
    13.0
    """
    recent = pace[-PACE_STEPS:]
    if len(recent) < 2 or recent[-1][0] <= recent[0][0]:
        return None
    (first, started), (last, ended) = recent[0], recent[-1]
    per_step = (ended - started) / (last - first)
    return max((steps - last) * per_step - (wall_s - ended), 0.0)


def _role(run_state: RunState, state: RoleState, values: dict[str, float], now: float) -> RoleView:
    waited = sorted(state.waited(now).items(), key=lambda item: -item[1])
    alive = max(now - run_state.started, 1e-9)
    waiting = Waiting(state.cause, state.on, now - state.since) if state.cause is not None else None
    return RoleView(
        state.role, state.ready, waiting, tuple((cause, s / alive) for cause, s in waited if s / alive > 0.005),
        values.get(f"system/cpu/{state.role}"), values.get(f"system/rss_bytes/{state.role}"),
        run_state.restarts.get(state.role, 0),
    )  # fmt: skip
