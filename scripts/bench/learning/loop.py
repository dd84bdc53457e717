"""One training run in one process: what most rows of the tables are made of.

    weights of version v - lag ──> engine ──> new groups ──> train_step (new and replayed groups) ──> version v + 1

Engine, episodes, training step, objective and the draw of replayed groups are those of a run. There is no buffer and no
other process, so that lag and replay are exact and do not depend on how fast the machine was. A seed fixes tasks,
initial weights and random streams, though not every bit: what is decoded together depends on timing, and changes
rounding.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from random import Random
from typing import Any

from fixed_lag import Lagged

from asyncrl.buffer.ledger.group import Group, Received, version_counts
from asyncrl.buffer.ledger.storage.payloads import Location
from asyncrl.buffer.replaying import Replaying, draw, seed_of
from asyncrl.config import Config
from asyncrl.learner.__main__ import compute_alike
from asyncrl.learner.batch import flatten
from asyncrl.success import success
from asyncrl.trajectory import Trajectory

NOWHERE = Location(0, 0, 0, 0)


def train(config: Config, lag: int) -> dict[str, Any]:
    """Held-out success of the last version, generated tokens, seconds, and one point of the curve for each step.

    `lag`: every new group is sampled by the weights of version v - lag, of version 0 while none is that old. With
    `eval.every` the held-out tasks are played before the first step and after every so many, outside the clock.
    """
    compute_alike(config)
    return asyncio.run(_trained(config, lag))


async def _trained(config: Config, lag: int) -> dict[str, Any]:
    began, cpu = time.perf_counter(), time.process_time()
    memory = Memory(config)
    curve: list[dict[str, float]] = []
    spent = 0.0
    async with Lagged(config, lag) as run:
        start = await _evaluated(run, config)
        while run.steps < config.learner.steps:
            began_step = time.process_time()
            new, played = await run.sample()
            again = memory.draw(run.steps, run.version)
            batch = flatten(
                [*played, *memory.trajectories(again)], [*new, *again], loss_weights=again if memory.rules else None
            )
            _, values = run.step(batch, played)
            curve.append(_point(config, played, again, values, curve))
            memory.used(again)
            memory.add(new, played, config.learner.group_size)
            spent += time.process_time() - began_step
            curve[-1] |= {"cpu_s": round(spent, 3), **await _evaluated(run, config)}
        held_out = await run.held_out()
    return {
        "held_out": held_out.share,
        "steps": len(curve),
        "tokens": curve[-1]["tokens"],
        "skipped": run.skipped,
        "wall_s": round(time.perf_counter() - began, 1),
        "cpu_s": round(time.process_time() - cpu, 1),
        "start": start,
        "curve": curve,
    }


async def _evaluated(run: Lagged, config: Config) -> dict[str, float]:
    """Success on the held-out tasks where `eval.every` asks for it now: sampled, and greedy with `eval.greedy`."""
    if not config.eval.every or run.steps % config.eval.every:
        return {}
    sampled = {"held_out": (await run.held_out()).share}
    return sampled | ({"greedy": (await run.held_out(greedy=True)).share} if config.eval.greedy else {})


def _point(
    config: Config,
    played: Sequence[Trajectory],
    again: dict[int, float],
    values: dict[str, float],
    curve: Sequence[dict[str, float]],
) -> dict[str, float]:
    """What is kept of one step."""
    before = curve[-1]["tokens"] if curve else 0.0
    return {
        "success": round(success(played, config.eval.success).share, 6),
        "reward": round(statistics.fmean(t.reward for t in played), 6),
        "tokens": before + sum(t.num_policy_tokens for t in played),
        "replayed": float(len(again)),
        "staleness": round(values["staleness/mean"], 4),
        "grad_norm": round(values["weights/grad_norm"], 4),
        "entropy": round(values["weights/entropy"], 4),
        "sequence_ess": round(values["correction/sequence_ess"], 4),
    }


class Memory:
    """Used groups that may be replayed, drawn as the buffer draws them (buffer/replaying.py)."""

    def __init__(self, config: Config) -> None:
        self.rules = Replaying.of(config)
        self._bound, self._uses, self._seed = config.buffer.max_staleness, config.buffer.max_uses, config.data.seed
        self._groups: dict[int, Group] = {}
        self._trajectories: dict[int, list[Trajectory]] = {}

    def draw(self, step: int, version: int) -> dict[int, float]:
        """Numbers of the groups that the batch of this step gets again, with the weights of their loss."""
        if self.rules is None:
            return {}
        for number in [n for n, g in self._groups.items() if version - (g.oldest or 0) > self._bound]:
            self._forget(number)
        drawn = draw(self.rules, self._groups.values(), version, Random(seed_of(self._seed, 0, step)))
        return {one.group: one.weight for one in drawn.drawn}

    def trajectories(self, numbers: dict[int, float]) -> list[Trajectory]:
        return [t for number in numbers for t in self._trajectories[number]]

    def used(self, numbers: dict[int, float]) -> None:
        """The batch with these groups again is trained."""
        for number in numbers:
            self._groups[number].uses += 1
            if self._groups[number].uses >= self._uses:
                self._forget(number)

    def add(self, numbers: Sequence[int], played: Sequence[Trajectory], size: int) -> None:
        """New groups, which their first batch has used."""
        if self.rules is None:
            return
        for number in numbers:
            group = Group(number, 0, number, str(number), size, "waiting", uses=1)
            mine = [t for t in played if t.id.group == number]
            for t in mine:
                group.store(t.id.index, Received.of(t, version_counts(t), "", NOWHERE))
            self._groups[number], self._trajectories[number] = group, mine

    def _forget(self, number: int) -> None:
        del self._groups[number], self._trajectories[number]
