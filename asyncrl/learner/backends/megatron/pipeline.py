"""The micro-batches of a step in a model whose layers are split over stages: Megatron's 1F1B schedule.

    stage 0    F0 F1    B0 F2 B1    B2      F: forward, sends hidden states on
    stage 1       F0 B0 F1 B1 F2 B2         B: backward, returns their gradient; the last stage computes the loss

Several pipelines compute the parts of a round (distribution.py) at the same time. The last stage of each calls the
loss; under `logprobs` their last stages gather the scores of all, and the other stages receive them once the schedule
has ended.

A teacher in this process computes all parts first, in a schedule of its own. The hidden states of their sampled tokens
wait in the last stage's host memory.
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

        rounds = self._rounds.plan(parts)
        of_teacher = self._of_teacher(scorer, parts, rounds)

        def scored(n: int, part: Packed, states: Tensor) -> Tensor | None:
            return end(rounds[n], scorer.scores(part, states, of_teacher[n]))

        self._schedule(scorer, [self._rounds.own(parts, r) for r in rounds], scored, forward_only=forward_only)

    def _of_teacher(
        self, scorer: Scorer, parts: Sequence[Packed], rounds: Sequence[list[int]]
    ) -> Sequence[Tensor | None]:
        """The teacher's hidden states of this rank's part of each round, on the last stage; None without a teacher."""
        teacher = scorer.teacher(parts[0]) if parts else None
        found: list[Tensor | None] = [None] * len(rounds)
        if teacher is None:
            return found

        def keep(n: int, part: Packed, states: Tensor) -> None:
            hidden = teacher.scorer.scores(part, states).hidden
            assert hidden is not None
            found[n] = hidden.cpu()

        read = [teacher.read(self._rounds.own(parts, r)) for r in rounds]
        with torch.no_grad():
            self._schedule(teacher.scorer, read, keep, forward_only=True)
        return found

    def _schedule(
        self,
        scorer: Scorer,
        own: Sequence[Packed],
        end: Callable[[int, Packed, Tensor], Tensor | None],
        *,
        forward_only: bool,
    ) -> None:
        """Runs this rank's parts through all stages; `end` receives the n-th with the states of the last stage there,
        and returns what is differentiated."""

        def forward(todo: Iterator[tuple[int, Packed]], _: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Any, ...]]]:
            n, part = next(todo)
            return scorer.states(part), partial(ended, n, part)

        def ended(n: int, part: Packed, states: Tensor) -> tuple[Tensor, Tensor, None]:
            share = end(n, part, states)
            return states if share is None else share, torch.zeros((), dtype=torch.int), None

        with self._computing():
            forward_backward_pipelining_without_interleaving(
                forward_step_func=forward,
                data_iterator=iter(enumerate(own)),
                model=scorer.run,
                num_microbatches=len(own),
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
