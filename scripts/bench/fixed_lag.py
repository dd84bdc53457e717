"""One training on samples of exactly a given lag, in one process; what `stale.py` runs for every objective and seed.

    ring of weights   v-lag .. v          ring[0] ──> engine ──> episodes of the batch ──> train_step ──> version v+1

The engine, the episodes, the training step and the objective are those of a run; there is no buffer, no other process.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from asyncrl.actors.engines import build_engine
from asyncrl.actors.episodes.episode import play
from asyncrl.actors.episodes.progress import EpisodeLimits, Progress
from asyncrl.actors.player import environment
from asyncrl.buffer.tasks.sources import open_source, ticket_seed
from asyncrl.config import Config
from asyncrl.learner.__main__ import compute_alike
from asyncrl.learner.backends.hf.torch import TorchBackend
from asyncrl.learner.batch import flatten
from asyncrl.learner.objective.objective import Objective
from asyncrl.learner.ragged import clamped_exp, log_ratio
from asyncrl.learner.reporting.metrics import step_metrics
from asyncrl.learner.step.diagnostics import effective_sample_size
from asyncrl.learner.step.train_step import train_step
from asyncrl.rendering.template import TemplateRenderer
from asyncrl.success import success
from asyncrl.trajectory import Kind, Ticket, TicketId, Trajectory
from asyncrl.weights.protocol import WeightsVersion

CURVES = {
    "success": "reward/success",
    "staleness": "staleness/mean",
    "sequence_ess": "correction/sequence_ess",
    "mismatch_kl": "correction/mismatch_kl",
    "clip_fraction": "correction/clip_fraction",
    "kept": "correction/kept",
    "entropy": "weights/entropy",
    "grad_norm": "weights/grad_norm",
}
"""Kept of every step"""


def train(config: Config, lag: int) -> dict[str, Any]:
    """Held-out success of the last version, effective sample sizes, seconds, and the curves."""
    compute_alike(config)
    return asyncio.run(_trained(config, lag))


async def _trained(config: Config, lag: int) -> dict[str, Any]:
    began, cpu = time.perf_counter(), time.process_time()
    backend, objective, player = TorchBackend(config, device="cpu"), Objective(config.learner), Player(config)
    ring: deque[Held] = deque(maxlen=lag + 1)
    curve: list[dict[str, float]] = []
    version = 0
    await player.engine.start()
    try:
        while len(curve) < config.learner.steps:
            ring.append(Held.of(backend, version))
            await player.hold(ring[0])
            groups = range(
                len(curve) * config.learner.groups_per_step, (len(curve) + 1) * config.learner.groups_per_step
            )
            played = await player.play("train", groups, config.learner.group_size)
            batch = flatten(played, groups)
            result = train_step(backend, objective, batch, config.learner, version=version)
            record, skipped = result.record, result.outcome == "guard"
            values = step_metrics(objective, batch, played, result, version=version, success=config.eval.success)
            ratio = clamped_exp(log_ratio(record.proximal, batch.behaviour, batch.mask))
            curve.append(
                {short: round(values[name], 6) for short, name in CURVES.items()}
                | {"ratio_ess": round(float(effective_sample_size(ratio, batch.mask)), 6), "skipped": float(skipped)}
            )
            version += not skipped
            if skipped:
                ring.pop()
        await player.hold(Held.of(backend, version))
        held_out = success(await player.play("eval", range(config.eval.tasks), 1), config.eval.success)
    finally:
        await player.engine.close()
    return {
        "success": held_out.share,
        "ratio_ess": statistics.fmean(point["ratio_ess"] for point in curve[lag:] or curve),
        "sequence_ess": statistics.fmean(point["sequence_ess"] for point in curve[lag:] or curve),
        "skipped": sum(point["skipped"] for point in curve),
        "wall_s": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu,
        "config": config.model_dump(),
        "curve": curve,
    }


@dataclass(frozen=True, slots=True)
class Held:
    """One policy version in memory."""

    id: WeightsVersion
    named: tuple[tuple[str, Tensor], ...]

    @classmethod
    def of(cls, backend: TorchBackend, version: int) -> Held:
        return cls(WeightsVersion(0, version, ""), tuple((name, t.clone()) for name, t in backend.weights()))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.named)

    def close(self) -> None: ...


class Player:
    """The actor's parts without its process: engine, renderer, environment."""

    def __init__(self, config: Config) -> None:
        self.engine = build_engine(config)
        self._config, self._source, self._make_env = config, open_source(config), environment(config)
        self._renderer, self._limits = TemplateRenderer.of(config), EpisodeLimits.of(config)

    async def hold(self, weights: Held) -> None:
        await self.engine.pause(recompute_kv=True)
        await self.engine.load(weights)
        await self.engine.resume()

    async def play(self, kind: Kind, groups: Sequence[int], size: int) -> list[Trajectory]:
        return await asyncio.gather(
            *(self._episode(kind, group, index, size) for group in groups for index in range(size))
        )

    async def _episode(self, kind: Kind, group: int, index: int, size: int) -> Trajectory:
        config = self._config
        ticket = Ticket(
            id=TicketId(0, group, index),
            attempt=0,
            kind=kind,
            task=self._source.task(group) if kind == "train" else self._source.held_out(group),
            min_version=self.engine.held_version,
            group_size=size,
            temperature=config.actors.temperature,
            seed=ticket_seed(config.actors.seed, kind, 0, group, index, 0),
            lease_s=config.buffer.lease_s,
        )
        progress = Progress(time.monotonic())
        result = await play(ticket, self._make_env, self.engine, self._renderer, self._limits, progress)
        return result.trajectory(ticket, progress, actor="bench", env_name=config.env.name)
