"""The run's advantage estimator, and those that environments have of their own (`learner.advantage_by_env`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from asyncrl.config.learner import LearnerConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.advantages import ESTIMATORS
from asyncrl.learner.advantages.episodes import Advantages
from asyncrl.learner.batch import Batch
from asyncrl.learner.objective.choice import Chosen, checked, chosen, chosen_entry

_OF_ROWS = ("lengths", "groups", "episodes", "baseline")


class Estimators:
    """Built once per run. Raises ConfigError, naming the field, for a name or option that cannot work."""

    def __init__(self, learner: LearnerConfig, inputs: Collection[str]) -> None:
        """`inputs`: what an estimator may read, which are no options."""
        self._all = chosen(learner.advantage, ESTIMATORS, learner.advantage_options, "learner.advantage", inputs)
        self._of_env = {
            env: chosen_entry(spec, ESTIMATORS, f"learner.advantage_by_env.{env}", inputs)
            for env, spec in learner.advantage_by_env.items()
        }
        self.read = self._all.parameters.union(*(one.parameters for one in self._of_env.values()))
        """Inputs that any of them reads."""

    def __iter__(self) -> Iterator[tuple[str, Chosen, str]]:
        """Field, estimator, and the environment that it is for; the one for all comes last, and is for none."""
        for env, one in self._of_env.items():
            yield f"learner.advantage_by_env.{env}", one, env
        yield "learner.advantage", self._all, ""

    def __call__(self, batch: Batch, known: dict[str, Any]) -> Advantages:
        """Of the whole batch. `known`: the inputs by name. Raises ConfigError where the data lack what an option
        names."""
        if not self._of_env:
            return _ask("learner.advantage", self._all, known)
        advantages = torch.zeros_like(known["rewards"], dtype=torch.float32)
        returns = torch.zeros_like(advantages)
        for place, env in enumerate(batch.env_names):
            rows = (batch.envs == place).nonzero()[:, 0]
            if not len(rows):
                continue
            t = batch.tokens_of(rows)
            field = f"learner.advantage_by_env.{env}" if env in self._of_env else "learner.advantage"
            found = _ask(field, self._of_env.get(env, self._all), _part(known, rows, t))
            advantages[t], returns[t] = found.advantages.to(advantages.dtype), found.returns.to(returns.dtype)
        return Advantages(advantages, returns)


def _ask(field: str, estimator: Chosen, known: dict[str, Any]) -> Advantages:
    try:
        return checked(estimator(known), Advantages, estimator)
    except ValueError as error:
        raise ConfigError(f"{field} is {estimator.name!r}: {error}") from error


def _part(known: dict[str, Any], rows: Tensor, t: Tensor) -> dict[str, Any]:
    """The inputs of the rows [b], whose tokens are `t`."""
    found = {}
    for name, value in known.items():
        if isinstance(value, Tensor):
            value = value[rows] if name in _OF_ROWS else value[..., t]
        found[name] = value
    return found
