"""The run's advantage estimator, and those that environments have of their own (`learner.advantage_by_env`)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from asyncrl.config.learner import LearnerConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.advantages import ESTIMATORS
from asyncrl.learner.advantages.estimator import Advantages, EstimatorInputs, needs_of
from asyncrl.learner.batch import Batch
from asyncrl.learner.objective.choice import Chosen, Kind, checked

_FIELD = "learner.advantage"
_KIND = Kind(ESTIMATORS, EstimatorInputs)


class Estimators:
    """Built once per run. Raises ConfigError, naming the field, for a name or option that cannot work."""

    def __init__(self, learner: LearnerConfig) -> None:
        self._default = _KIND.choose(learner.advantage, learner.advantage_options, _FIELD)
        self._by_env = {
            env: _KIND.choose_entry(spec, f"{_FIELD}_by_env.{env}") for env, spec in learner.advantage_by_env.items()
        }
        self.needs = needs_of(self._default.function).union(*(needs_of(e.function) for e in self._by_env.values()))
        """Optional inputs that any of them reads."""

    def __iter__(self) -> Iterator[tuple[str, Chosen, str]]:
        """Field, estimator and environment of each; the default comes last, with no environment."""
        for env, estimator in self._by_env.items():
            yield f"{_FIELD}_by_env.{env}", estimator, env
        yield _FIELD, self._default, ""

    def __call__(self, batch: Batch, inputs: EstimatorInputs) -> Advantages:
        """Advantages of the whole batch. Raises ConfigError where the data lack what an option names."""
        if not self._by_env:
            return _estimate(_FIELD, self._default, inputs)
        advantages = torch.zeros_like(inputs.rewards, dtype=torch.float32)
        returns = torch.zeros_like(advantages)
        for i, env in enumerate(batch.env_names):
            row_ids = (batch.envs == i).nonzero()[:, 0]
            if not len(row_ids):
                continue
            t = batch.tokens_of(row_ids)
            field = f"{_FIELD}_by_env.{env}" if env in self._by_env else _FIELD
            estimated = _estimate(field, self._by_env.get(env, self._default), inputs.take(row_ids, t))
            advantages[t], returns[t] = estimated.advantages.to(advantages.dtype), estimated.returns.to(returns.dtype)
        return Advantages(advantages, returns)


def _estimate(field: str, estimator: Chosen, inputs: EstimatorInputs) -> Advantages:
    try:
        return checked(estimator(inputs.only(needs_of(estimator.function))), Advantages, estimator)
    except ValueError as error:
        raise ConfigError(f"{field} is {estimator.name!r}: {error}") from error
