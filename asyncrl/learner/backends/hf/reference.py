"""The reference model of the KL term where adapters are trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from asyncrl.learner.backends.hf.scorer import Scorer


class Reference:
    """Other adapters over the same base; at the start they add nothing."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._adapters = self._copied()

    @contextmanager
    def scoring(self) -> Iterator[Scorer]:
        """The scorer with the reference's adapters in place of the policy's."""
        policy = self._copied()
        self._put(self._adapters)
        try:
            yield self._scorer
        finally:
            self._put(policy)

    def refresh(self) -> None:
        self._adapters = self._copied()

    def state_dict(self) -> dict[str, Tensor]:
        return self._adapters

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._adapters = {name: state[name].clone() for name in self._adapters}

    def _copied(self) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in self._scorer.model.named_parameters() if p.requires_grad}

    def _put(self, values: Mapping[str, Tensor]) -> None:
        parameters = dict(self._scorer.model.named_parameters())
        with torch.no_grad():
            for name, value in values.items():
                parameters[name].copy_(value)
