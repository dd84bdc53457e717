"""Several sources as one, by weight. `env` of a task names its source; `env.name: mix` plays it in that environment."""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Mapping
from typing import Any

from asyncrl.data import SOURCES
from asyncrl.data.base import Task, TaskSource
from asyncrl.data.checked import check_members
from asyncrl.errors import ConfigError
from asyncrl.plugins import build

CYCLE = 1000
"""Tasks after which every source has its exact share: weights count to a thousandth."""


class MixSource:
    """Draws from each source by its weight, in an order set by the seed; each source keeps its own order."""

    def __init__(self, sources: dict[str, dict[str, Any]], *, model: str = "", seed: int = 0) -> None:
        """
        Args:
            sources: by name: `{source, options, weight, group_size}`: `source` and `options` as `data.source` and
                `data.options`; `weight` 1 if not set, `group_size` as `learner.group_size` if not set.
        Raises ConfigError.
        """
        if not sources:
            raise ConfigError(
                "data.options.sources is empty; expected {name: {source: ..., options: ..., weight: ...}}"
            )
        self._names = list(sources)
        weights = [_weight(name, spec) for name, spec in sources.items()]
        self._group_sizes = [_group_size(name, spec) for name, spec in sources.items()]
        self.group_sizes = [size for size in self._group_sizes if size is not None]
        self._sources = [_open(name, spec, seed, model) for name, spec in sources.items()]
        cycle = [k for k, count in enumerate(shares(weights, CYCLE)) for _ in range(count)]
        random.Random(f"mix/{seed}").shuffle(cycle)
        self._cycle = cycle
        self._places: list[list[int]] = [[i for i, k in enumerate(cycle) if k == s] for s in range(len(weights))]
        # Unlimited: the source at an index follows from the weights, not from the sizes.
        self.train_size: int | None = None
        self.held_out_size = sum(source.held_out_size for source in self._sources)

    def group_size(self, index: int) -> int | None:
        """Size of the group of the task at `index`; None: `learner.group_size`."""
        return self._group_sizes[self._cycle[index % CYCLE]]

    def task(self, index: int) -> Task:
        rounds, place = divmod(index, CYCLE)
        k = self._cycle[place]
        places = self._places[k]
        return self._named(k, self._sources[k].task(rounds * len(places) + bisect.bisect_left(places, place)))

    def held_out(self, index: int) -> Task:
        """Round robin, so that the first few tasks are of all sources."""
        if not 0 <= index < self.held_out_size:
            raise IndexError(f"held-out task {index}: expected 0 <= index < {self.held_out_size}")
        depth = 0
        while True:
            layer = [k for k, source in enumerate(self._sources) if source.held_out_size > depth]
            if index < len(layer):
                return self._named(layer[index], self._sources[layer[index]].held_out(depth))
            index -= len(layer)
            depth += 1

    def _named(self, k: int, task: Task) -> Task:
        name = self._names[k]
        return {"data_source": name, **task, "id": f"{name}/{task['id']}", "env": name}


def shares(weights: list[float], places: int) -> list[int]:
    """`places` divided in proportion to `weights`, by largest remainder.

    >>> shares([2.0, 1.0], 10)
    [7, 3]
    """
    exact = [weight / sum(weights) * places for weight in weights]
    counts = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda k: counts[k] - exact[k])
    for k in by_remainder[: places - sum(counts)]:
        counts[k] += 1
    return counts


_FIELDS = {"source", "options", "weight", "group_size"}


def _group_size(name: str, spec: Mapping[str, Any]) -> int | None:
    size = spec.get("group_size")
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise ConfigError(f"data.options.sources.{name}.group_size is {size!r}; expected a number of trajectories >= 1")
    return size


def _weight(name: str, spec: Any) -> float:
    field = f"data.options.sources.{name}"
    if not isinstance(spec, Mapping) or "source" not in spec or set(spec) - _FIELDS:
        raise ConfigError(f"{field} is {spec!r}; expected {{source: ..., options: ..., weight: ..., group_size: ...}}")
    weight = spec.get("weight", 1.0)
    if not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise ConfigError(f"{field}.weight is {weight!r}; expected a number above 0; leave out what has no weight")
    return float(weight)


def _open(name: str, spec: Mapping[str, Any], seed: int, model: str) -> TaskSource:
    field, options = f"data.options.sources.{name}", spec.get("options", {})
    source: TaskSource = build(
        spec["source"],
        SOURCES,
        f"{field}.source",
        options,
        options_field=f"{field}.options",
        defaults={"seed": seed, "model": model},
    )
    check_members(source, f"{field}.source", spec["source"])
    return source
