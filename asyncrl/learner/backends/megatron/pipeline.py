"""The micro-batches of a step through a model whose layers several stages share: Megatron's 1F1B schedule.

    stage 0    F0 F1    B0 F2 B1    B2      F: forward, hands hidden states on
    stage 1       F0 B0 F1 B1 F2 B2         B: backward, hands their gradient back; the loss is the last stage's

Several pipelines compute the parts of a round (distribution.py) at the same time, and their last stages see the scores
of all. The other stages are told once the schedule has ended, and then ask for the loss of each part as every rank
does: so the scores of an `accumulate` stay on the last stage until then, two numbers a token, and a state each with a
shared critic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving
from torch import Tensor

from asyncrl.learner.backends.distribution import Loss, Rounds, broadcast, settle
from asyncrl.learner.backends.megatron.groups import Groups
from asyncrl.learner.backends.megatron.scorer import Scorer
from asyncrl.learner.backends.protocol import Packed, Scores


class Pipeline:
    """As one rank of a stage sees it."""

    def __init__(self, rounds: Rounds, groups: Groups, computing: Callable[[], AbstractContextManager[object]]) -> None:
        """`computing`: entered around the schedule."""
        self._rounds, self._stages, self._last, self._computing = rounds, groups.stages, groups.last, computing

    def logprobs(self, scorer: Scorer, parts: Sequence[Packed]) -> list[Scores]:
        """Backend.logprobs."""
        found: dict[int, Scores] = {}
        with torch.no_grad():
            for together, scores in self._told(scorer, parts, self._played(scorer, parts, None)):
                found |= zip(together, scores, strict=True)
        return [found[i] for i in range(len(parts))]

    def accumulate(self, scorer: Scorer, parts: Sequence[Packed], loss: Loss) -> None:
        """Backend.accumulate."""
        for together, scores in self._told(scorer, parts, self._played(scorer, parts, loss)):
            if not self._last:
                for i, seen in zip(together, scores, strict=True):
                    settle(loss(i, seen))

    def _played(self, scorer: Scorer, parts: Sequence[Packed], loss: Loss | None) -> list[list[Scores]]:
        """Forward, and with a loss backward; on the last stage the scores of each round."""
        found: list[list[Scores]] = []

        def forward(rounds: Iterator[list[int]], _: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Any, ...]]]:
            together = next(rounds)
            part = self._rounds.own(parts, together)
            return scorer.states(part), partial(end, together, part)

        def end(together: list[int], part: Packed, states: Tensor) -> tuple[Tensor, Tensor, None]:
            own = scorer.scores(part, states)
            seen = self._rounds.gathered(parts, together, own)
            found.append(seen)
            share = states if loss is None else self._rounds.share(together, own, seen, loss)
            return share, torch.zeros((), dtype=torch.int), None

        rounds = self._rounds.plan(parts)
        with self._computing():
            forward_backward_pipelining_without_interleaving(
                forward_step_func=forward,
                data_iterator=iter(rounds),
                model=scorer.run,
                num_microbatches=len(rounds),
                seq_length=1,  # stages tell each other how many tokens come
                micro_batch_size=1,
                forward_only=loss is None,
            )
        return found

    def _told(
        self, scorer: Scorer, parts: Sequence[Packed], found: list[list[Scores]]
    ) -> Iterator[tuple[list[int], list[Scores]]]:
        """The parts of each round and their scores, of the last stage, on every stage."""
        width, device = scorer.decoder.config.hidden_size, scorer.device
        for n, together in enumerate(self._rounds.plan(parts)):
            yield (
                together,
                broadcast(
                    [parts[i] for i in together],
                    found[n] if self._last else None,
                    width=width,
                    device=device,
                    source=self._stages.size() - 1,
                    group=self._stages,
                ),
            )
