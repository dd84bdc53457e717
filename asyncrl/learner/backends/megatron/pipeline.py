"""The micro-batches of a step in a model whose layers are split over stages: Megatron's 1F1B schedule.

    stage 0    F0 F1    B0 F2 B1    B2      F: forward, sends hidden states on
    stage 1       F0 B0 F1 B1 F2 B2         B: backward, returns their gradient; the last stage computes the loss

Several pipelines compute the parts of a round (distribution.py) at the same time. The last stage of each calls the
loss; under `logprobs` their last stages gather the scores of all, and the other stages receive them once the schedule
has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving
from torch import Tensor

from asyncrl.learner.backends.distribution import Loss, Rounds, See, broadcast
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
        by_round: list[list[Scores]] = []

        def keep(in_round: list[int], own: Scores) -> None:
            by_round.append(self._rounds.gathered(parts, in_round, own))

        with torch.no_grad():
            self._run(scorer, parts, keep, forward_only=True)
            for in_round, scores in self._broadcast(scorer, parts, by_round):
                scores_of |= zip(in_round, scores, strict=True)
        return [scores_of[i] for i in range(len(parts))]

    def visit(self, scorer: Scorer, parts: Sequence[Packed], see: See) -> None:
        """Backend.visit."""
        with torch.no_grad():
            self._run(scorer, parts, lambda in_round, own: self._rounds.show(in_round, own, see), forward_only=True)

    def accumulate(self, scorer: Scorer, parts: Sequence[Packed], loss: Loss) -> None:
        """Backend.accumulate."""
        self._run(scorer, parts, lambda in_round, own: self._rounds.share(in_round, own, loss), forward_only=False)

    def _run(
        self,
        scorer: Scorer,
        parts: Sequence[Packed],
        end: Callable[[list[int], Scores], Tensor | None],
        *,
        forward_only: bool,
    ) -> None:
        """Runs forward passes, and unless `forward_only` backward; `end` receives the scores of each round on the last
        stage, and returns what is differentiated."""

        def forward(rounds: Iterator[list[int]], _: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Any, ...]]]:
            in_round = next(rounds)
            part = self._rounds.own(parts, in_round)
            return scorer.states(part), partial(scored, in_round, part)

        def scored(in_round: list[int], part: Packed, states: Tensor) -> tuple[Tensor, Tensor, None]:
            share = end(in_round, scorer.scores(part, states))
            return states if share is None else share, torch.zeros((), dtype=torch.int), None

        rounds = self._rounds.plan(parts)
        with self._computing():
            forward_backward_pipelining_without_interleaving(
                forward_step_func=forward,
                data_iterator=iter(rounds),
                model=scorer.run,
                num_microbatches=len(rounds),
                seq_length=1,  # stages send each other the number of tokens
                micro_batch_size=1,
                forward_only=forward_only,
            )

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
