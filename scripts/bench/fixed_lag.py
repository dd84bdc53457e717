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
from asyncrl.learner.batch import Batch, flatten
from asyncrl.learner.objective.objective import Objective
from asyncrl.learner.ragged import clamped_exp, log_ratio
from asyncrl.learner.reporting.metrics import step_metrics
from asyncrl.learner.step.diagnostics import effective_sample_size
from asyncrl.learner.step.train_step import StepResult, train_step
from asyncrl.rendering.template import TemplateRenderer
from asyncrl.success import Success, success
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
    curve: list[dict[str, float]] = []
    async with Lagged(config, lag) as run:
        while run.steps < config.learner.steps:
            groups, played = await run.sample()
            batch = flatten(played, groups)
            result, values = run.step(batch, played)
            ratio = clamped_exp(log_ratio(result.record.proximal, batch.behaviour, batch.mask))
            skipped = float(result.outcome == "guard")
            curve.append(
                {short: round(values[name], 6) for short, name in CURVES.items()}
                | {"ratio_ess": round(float(effective_sample_size(ratio, batch.mask)), 6), "skipped": skipped}
            )
        held_out = await run.held_out()
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


class Lagged:
    """A training in one process in which version v - lag samples what version v is trained on; version 0 while none is
    that old. For each step: `sample`, then `step`."""

    def __init__(self, config: Config, lag: int) -> None:
        self._config = config
        self._backend, self._objective = TorchBackend(config, device="cpu"), Objective(config.learner)
        self._player = Player(config)
        self._ring: deque[Held] = deque(maxlen=lag + 1)
        self.version = self.steps = self.skipped = 0

    async def __aenter__(self) -> Lagged:
        await self._player.engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._player.engine.close()

    async def sample(self) -> tuple[range, list[Trajectory]]:
        """Numbers and trajectories of the next new groups."""
        self._ring.append(Held.of(self._backend, self.version))
        await self._player.hold(self._ring[0])
        size = self._config.learner.groups_per_step
        groups = range(self.steps * size, (self.steps + 1) * size)
        return groups, await self._player.play("train", groups, self._config.learner.group_size)

    def step(self, batch: Batch, played: Sequence[Trajectory]) -> tuple[StepResult, dict[str, float]]:
        """Trains on the batch; the result and the series of the step, in which `played` counts as new."""
        learner, version, rule = self._config.learner, self.version, self._config.eval.success
        result = train_step(self._backend, self._objective, batch, learner, version=version)
        values = step_metrics(self._objective, batch, played, result, version=version, success=rule)
        self.steps += 1
        if result.outcome == "guard":
            self.skipped += 1
            self._ring.pop()
        else:
            self.version += 1
        return result, values

    async def held_out(self, *, greedy: bool = False) -> Success:
        """Of the present weights, one episode for each held-out task, at the training temperature or greedily."""
        await self._player.hold(Held.of(self._backend, self.version))
        temperature = 0.0 if greedy else self._config.actors.temperature
        played = await self._player.play("eval", range(self._config.eval.tasks), 1, temperature)
        return success(played, self._config.eval.success)


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

    async def play(
        self, kind: Kind, groups: Sequence[int], size: int, temperature: float | None = None
    ) -> list[Trajectory]:
        """At the training temperature, unless another is given."""
        heat = self._config.actors.temperature if temperature is None else temperature
        return await asyncio.gather(
            *(self._episode(kind, group, index, size, heat) for group in groups for index in range(size))
        )

    async def _episode(self, kind: Kind, group: int, index: int, size: int, temperature: float) -> Trajectory:
        config = self._config
        ticket = Ticket(
            id=TicketId(0, group, index),
            attempt=0,
            kind=kind,
            task=self._source.task(group) if kind == "train" else self._source.held_out(group),
            min_version=self.engine.held_version,
            group_size=size,
            temperature=temperature,
            seed=ticket_seed(config.actors.seed, kind, 0, group, index, 0),
            lease_s=config.buffer.lease_s,
        )
        progress = Progress(time.monotonic())
        result = await play(ticket, self._make_env, self.engine, self._renderer, self._limits, progress)
        return result.trajectory(ticket, progress, actor="bench", env_name=config.env.name)
