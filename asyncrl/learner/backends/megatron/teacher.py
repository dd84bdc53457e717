"""A teacher under Megatron-core: a frozen model, divided over the ranks as the policy is, or the policy itself, or an
average of it (hf/moving.py says which).

An average is kept in float32, whatever the layers compute in: the small steps that it takes would be rounded away.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.learner.backends.hf.moving import refuse_missing_average, rule_of
from asyncrl.learner.backends.hf.teacher import FIELD, positions_of, refuse_longer, source_of_teacher
from asyncrl.learner.backends.hinted import with_hints
from asyncrl.learner.backends.megatron.building import Builder
from asyncrl.learner.backends.megatron.checkpoint import Saved
from asyncrl.learner.backends.megatron.model import layout_of
from asyncrl.learner.backends.megatron.pieces import Pieces
from asyncrl.learner.backends.megatron.scorer import LocalTeacher, Scorer
from asyncrl.learner.backends.protocol import Packed, Scores
from asyncrl.model import load_model

STATE = "teacher"
"""Of a checkpoint: the average's weights."""


def frozen_teacher(
    config: Config, builder: Builder, policy: Scorer, score: Callable[[Scorer, Packed], Scores]
) -> tuple[LocalTeacher, str]:
    """The teacher of `learner.teacher`, and its digest. `score`: of a part, through all stages. Raises ConfigError,
    naming the field, as `teacher_of` of hf/teacher.py does, and for a model that cannot be divided so."""
    loaded = source_of_teacher(config)
    source, positions = loaded.model, positions_of(loaded.model)
    layout = layout_of(source.config, builder.options, FIELD)
    scorer = builder.frozen(source, layout)
    builder.check(source, lambda part: score(scorer, part), FIELD, config.learner.teacher.path)
    rows: Tensor | None = None
    if builder.groups.last and layout.vocabulary != policy.vocabulary:
        # In a head of another size than the policy's, this rank's rows are of other words.
        mine = slice(policy.first, policy.first + len(policy.head()))
        whole: Tensor = source.get_output_embeddings().weight.detach()
        rows = whole[mine].to(builder.device, builder.dtype, copy=True)

    def head() -> Tensor:
        return scorer.head() if rows is None else rows

    def shown(part: Packed) -> Packed:
        refuse_longer(part, positions)
        return part

    return LocalTeacher(scorer, shown, head, layout.vocabulary), loaded.digest


class MovingTeacher:
    """The policy itself, or a copy or an average of it."""

    def __init__(self, policy: Scorer, copy: Scorer | None, rate: float, average: dict[str, Tensor]) -> None:
        """`copy`: of the policy as it begins; None: the policy itself is the teacher. `average`: its pieces in float32,
        by Megatron's names, where its weights follow from nothing else than all steps so far."""
        self._policy, self._copy, self._rate = policy, copy, rate
        self.scorer, self.average, self.digest = copy or policy, average, rule_of(rate)

    def local(self) -> LocalTeacher:
        return LocalTeacher(self.scorer, with_hints, lambda: self.scorer.head().detach(), self._policy.vocabulary)

    @torch.no_grad()
    def move(self, policy: Callable[[str], Tensor]) -> None:
        """Moves towards the policy, after an applied training step. `policy`: its float32 pieces; collective."""
        if self._copy is None or not self._rate:
            return
        if not self.average:
            self._copy.decoder.load_state_dict(self._policy.decoder.state_dict())
            return
        for name, parameter in self._copy.decoder.named():
            average = self.average[name]
            average.lerp_(policy(name), self._rate)
            parameter.copy_(average)

    @torch.no_grad()
    def load(self, saved: Saved, pieces: Pieces, policy: Callable[[str], Tensor]) -> None:
        """Continues from a checkpoint, whose policy has been loaded; a copy that is renewed after each step is that.
        Raises RunError for one without the average."""
        if not self.average:
            if self._rate == 1:
                self.move(policy)
            return
        if not saved.has(STATE):
            refuse_missing_average(saved.folder, f"{STATE}/ weights")
        for name, parameter in self.scorer.decoder.named():
            self.average[name].copy_(pieces.piece(name, lambda n: saved.state(f"{STATE}/{n}")))
            parameter.copy_(self.average[name])


def moving_teacher(config: Config, builder: Builder, policy: Scorer, pieces: Pieces) -> MovingTeacher | None:
    """The teacher of `learner.teacher.path: policy`; None for another."""
    given = config.learner.teacher
    if not given.moves:
        return None
    if not given.copied(config.learner.minibatches):
        return MovingTeacher(policy, None, given.update_rate, {})
    first = load_model(config.model, torch.float32)
    copy = builder.frozen(first, layout_of(first.config, builder.options))
    average: dict[str, Tensor] = {}
    if 0 < given.update_rate < 1:
        state = first.state_dict()
        for name, parameter in copy.decoder.named():
            average[name] = pieces.piece(name, state.__getitem__).to(parameter.device, torch.float32, copy=True)
    return MovingTeacher(policy, copy, given.update_rate, average)
