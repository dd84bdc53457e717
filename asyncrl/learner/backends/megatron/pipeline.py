"""The micro-batches of a step in a model whose layers are split over stages: Megatron's 1F1B schedule.

    stage 0    F0 F1    B0 F2 B1    B2      F: forward, sends hidden states on
    stage 1       F0 B0 F1 B1 F2 B2         B: backward, returns their gradient; the last stage computes the loss

Several pipelines compute the parts of a round (distribution.py) at the same time, and their last stages have the scores
of all. The other stages receive them once the schedule has ended, and then call the loss of each part, as every rank
must. Until then the last stage keeps the scores of an `accumulate`: two numbers a token, and a state with a shared
critic.
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
    """The pipeline of one rank."""

    def __init__(self, rounds: Rounds, groups: Groups, computing: Callable[[], AbstractContextManager[object]]) -> None:
        """`computing`: entered around the schedule."""
        self._rounds, self._stages, self._last, self._computing = rounds, groups.stages, groups.last, computing

    def logprobs(self, scorer: Scorer, parts: Sequence[Packed]) -> list[Scores]:
        """Backend.logprobs."""
        scores_of: dict[int, Scores] = {}
        with torch.no_grad():
            for in_round, scores in self._broadcast(scorer, parts, self._run(scorer, parts, None)):
                scores_of |= zip(in_round, scores, strict=True)
        return [scores_of[i] for i in range(len(parts))]

    def accumulate(self, scorer: Scorer, parts: Sequence[Packed], loss: Loss) -> None:
        """Backend.accumulate."""
        for in_round, scores in self._broadcast(scorer, parts, self._run(scorer, parts, loss)):
            if not self._last:
                for i, seen in zip(in_round, scores, strict=True):
                    settle(loss(i, seen))

    def _run(self, scorer: Scorer, parts: Sequence[Packed], loss: Loss | None) -> list[list[Scores]]:
        """Runs forward passes, and with a loss backward; returns the scores of each round on the last stage."""
        by_round: list[list[Scores]] = []

        def forward(rounds: Iterator[list[int]], _: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Any, ...]]]:
            in_round = next(rounds)
            part = self._rounds.own(parts, in_round)
            return scorer.states(part), partial(end, in_round, part)

        def end(in_round: list[int], part: Packed, states: Tensor) -> tuple[Tensor, Tensor, None]:
            own = scorer.scores(part, states)
            seen = self._rounds.gathered(parts, in_round, own)
            by_round.append(seen)
            share = states if loss is None else self._rounds.share(in_round, own, seen, loss)
            return share, torch.zeros((), dtype=torch.int), None

        rounds = self._rounds.plan(parts)
        with self._computing():
            forward_backward_pipelining_without_interleaving(
                forward_step_func=forward,
                data_iterator=iter(rounds),
                model=scorer.run,
                num_microbatches=len(rounds),
                seq_length=1,  # stages send each other the number of tokens
                micro_batch_size=1,
                forward_only=loss is None,
            )
        return by_round

    def _broadcast(
        self, scorer: Scorer, parts: Sequence[Packed], by_round: list[list[Scores]]
    ) -> Iterator[tuple[list[int], list[Scores]]]:
        """The parts of each round and their scores, from the last stage, on every stage."""
        width, device = scorer.decoder.config.hidden_size, scorer.device
        for n, in_round in enumerate(self._rounds.plan(parts)):
            yield (
                in_round,
                broadcast(
                    [parts[i] for i in in_round],
                    by_round[n] if self._last else None,
                    width=width,
                    device=device,
                    source=self._stages.size() - 1,
                    group=self._stages,
                ),
            )
