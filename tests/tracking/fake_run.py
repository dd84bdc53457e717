"""A fake run: the messages that the roles of a small run would send, without the roles."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from typing import Any

from asyncrl.tracking.series import BUCKETS, FATES, histogram
from asyncrl.tracking.state import Record, RunState

Message = dict[str, Any]


def message(
    role: str, t: float, kind: str, *, pid: int = 1, waits=None, cause=None, on="", since=None, **body
) -> Message:
    return {
        "role": role, "pid": pid, "t": t, "kind": kind, "waits": waits or {}, "cause": cause, "on": on,
        "since": t if since is None else since, "lost": 0, "unknown": 0, **body,
    }  # fmt: skip


def metrics(role: str, t: float, values: dict[str, float], step: int | None = None, **more) -> Message:
    return message(role, t, "metrics", values=values, step=step, **more)


def fake_run(steps: int = 60, start: float = 0.0, seed: int = 0) -> Iterator[Message]:
    """Two actors, the buffer and the learner, from ready to the last evaluation. Deterministic."""
    rng = random.Random(seed)
    t, waits = start, {"learner": 0.0, "actor-0": 0.0, "actor-1": 0.0}
    roles = ("learner", "buffer", "actor-0", "actor-1")
    for pid, role in enumerate(roles, 100):
        yield message(role, t + 0.5, "ready", pid=pid)
    t += 5.0
    held_out = {"reward/held_out_success_sampled": 0.31, "reward/held_out_success_greedy": 0.42}
    yield metrics("learner", t, held_out, step=0, pid=100)
    for step in range(1, steps + 1):
        t += 1.1 + 0.3 * rng.random()
        p = 0.95 / (1 + math.exp(-(step - 0.35 * steps) / (0.12 * steps))) + 0.03 * rng.gauss(0, 1)
        waits["learner"] += 0.15 + 0.1 * rng.random()
        for actor in ("actor-0", "actor-1"):
            waits[actor] += 0.08 + 0.05 * rng.random()
            yield metrics(
                actor, t - 0.3,
                {"throughput/tokens_generated": 3300.0 * step + 200 * rng.random(), "throughput/requests_running": 30,
                 "throughput/slots_busy": 0.93, "weights/held_version": step - 1.0, "weights/paused_share": 0.02},
                pid=roles.index(actor) + 100, waits={"ticket": waits[actor] * 0.7, "weights": waits[actor] * 0.3},
            )  # fmt: skip
        yield metrics("buffer", t - 0.1, _buffer(step, p, rng), pid=101)
        yield message("learner", t - 0.05, "event", event="published", fields={"version": step}, pid=100)
        yield metrics(
            "learner", t, _learner(step, p, rng), step=step, pid=100,
            waits={"batch": waits["learner"], "publish": 0.04 * step},
        )  # fmt: skip
    yield metrics(
        "learner", t + 5, {"reward/held_out_success_sampled": 0.93, "reward/held_out_success_greedy": 0.95}, step=steps,
        pid=100, waits={"batch": waits["learner"], "publish": 0.04 * steps, "evaluation": 4.8},
    )  # fmt: skip


def _buffer(step: int, p: float, rng: random.Random) -> dict[str, float]:
    dropped = step // 10
    values: dict[str, float] = {
        "buffer/groups/issued": 16.0 * step + 24, "buffer/groups/in_flight": 14.0, "buffer/groups/waiting": 6.0,
        "buffer/groups/assigned": 4.0, "buffer/groups/trained": 16.0 * step - dropped, "buffer/groups/dropped": dropped,
        "buffer/dropped/stale": dropped, "buffer/fill": min(0.35 + 0.1 * rng.random(), 1.0),
        "buffer/puts": 128.0 * step, "buffer/late": 2.0 * (step // 20), "buffer/duplicates": 0.0,
        "throughput/tokens_wasted/stale": 900.0 * dropped,
        **histogram("staleness/in_queue", {0: 2, 1: 4}), **histogram("staleness/in_flight", {0: 8, 1: 5, 2: 1}),
    }  # fmt: skip
    for fate, length, turns, reward in zip(FATES, (52.0, 51.5, 88.0), (3.1, 3.1, 4.9), (p, p, p - 0.2), strict=True):
        values |= {f"buffer/length/{fate}": length, f"buffer/turns/{fate}": turns, f"buffer/reward/{fate}": reward}
        values[f"buffer/count/{fate}"] = {"generated": 128.0 * step, "dropped": 8.0 * dropped}.get(fate, 124.0 * step)
        values[f"buffer/env_count/{fate}/lookup"] = values[f"buffer/count/{fate}"]
    return values


def _learner(step: int, p: float, rng: random.Random) -> dict[str, float]:
    shares = (0.34, 0.5, 0.16, 0.0, 0.0, 0.0, 0.0)
    values = {
        "throughput/tokens_trained": 6500.0 * step, "throughput/compute_s": 0.9, "reward/mean": p,
        "reward/success": max(min(p + 0.02, 1.0), 0.0), "reward/turns": 3.0, "reward/length": 52.0,
        "staleness/mean": 0.82, "staleness/max": 2.0, "correction/ess": 0.93 + 0.03 * rng.random(),
        "correction/mismatch_kl": 0.004 + 0.002 * rng.random(), "correction/clip_fraction": 0.02,
        "weights/loss": 0.01 * rng.gauss(0, 1), "weights/grad_norm": 0.4, "weights/entropy": 0.8 - 0.5 * p,
        "weights/lr": 1e-3, "weights/publish_s": 0.04,
    }  # fmt: skip
    values |= {f"staleness/trained_tokens/{b}": s for b, s in zip(BUCKETS, shares, strict=True)}
    values |= {f"correction/ess/{b}": 0.99 - 0.03 * i for i, b in enumerate(BUCKETS[:3])}
    return values


def played(run_state: RunState, messages: Iterable[Message]) -> list[Record]:
    """The records that the messages give."""
    records = []
    for m in messages:
        event = run_state.take(m)
        if event is not None and event.kind == "step":
            records.append(run_state.record(event.fields["step"], m["t"]))
    return records
