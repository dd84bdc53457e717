"""The teacher's part of the objective (`learner.teacher`): a term of the loss, or a part of each token's advantage.

theta, p, mu: logprob of the sampled token under the current, the proximal and the behaviour policy; q: the teacher's.

    into       over                  per token
    loss       vocabulary, top_k     D of current policy and teacher, where the token was sampled; no importance weight
    loss       token                 -w sg(A(e^(q - theta))) theta in gradient, w f(e^(q - theta)) in value, with
                                     w = min(e^(theta - mu), ratio_cap), constant
    advantage  token                 A(e^(q - p)), which the objective's loss and corrections treat like any advantage

D, f and A are those of distillation/divergence.py; A and f are clamped to ±limit.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from asyncrl.config.learner import TeacherConfig
from asyncrl.learner.advantages.estimator import Advantages
from asyncrl.learner.backends.comparison import ROWS
from asyncrl.learner.batch import Batch
from asyncrl.learner.distillation.divergence import Divergence
from asyncrl.learner.ragged import LOG_RATIO_LIMIT, clamped_exp, masked


class TeacherTerm:
    """The teacher's term in the loss of one run. Without a teacher nothing asks it for more than `active`."""

    def __init__(self, given: TeacherConfig) -> None:
        self.active = bool(given.path)
        self.in_advantage = self.active and given.into == "advantage"
        self.in_loss = self.active and given.into == "loss" and given.coef > 0
        self.in_updates = self.active and not self.in_advantage
        """Whether the passes of the updates compare with the teacher; otherwise a pass before them does."""
        self.coef, self.over = given.coef, given.over
        self._given, self._divergence = given, Divergence(given.divergence, given.jsd_beta)

    def taught(self, estimated: Advantages, rows: Batch, proximal: Tensor | None, seen: Tensor | None) -> Advantages:
        """The advantages with the teacher's part. `proximal` [T], `seen` [6, T]: given if `in_advantage`."""
        if not self.active:
            return estimated
        advantages = self._given.reward_weight * estimated.advantages
        if self.in_advantage:
            assert proximal is not None
            assert seen is not None
            of_teacher = self._divergence.advantage(_log_ratio(proximal, seen, rows.sampled))
            advantages = advantages + self.coef * masked(self._limited(of_teacher), rows.compared)
        return replace(estimated, advantages=advantages)

    def per_token(self, rows: Batch, current: Tensor, seen: Tensor) -> Tensor:
        """[T], with gradient: the divergence, or its estimate from the sampled token; 0 outside the mask, and in rows
        in which a teacher that is the policy itself is shown nothing.

        `current` [T] carries the gradient of the sampled tokens' logprobs, `seen` [6, T] that of the divergence.
        """
        if self._given.over != "token":
            return masked(seen[ROWS.index("divergence")], rows.mask & rows.compared)
        mask = rows.mask & rows.compared
        log_r = _log_ratio(current.detach(), seen, mask)
        weight = clamped_exp(masked(current.detach() - rows.behaviour, mask)).clamp(max=self._given.ratio_cap)
        value = weight * self._limited(self._divergence.estimate(log_r))
        slope = weight * self._limited(self._divergence.advantage(log_r))
        return masked(value - slope * (current - current.detach()), mask)

    def _limited(self, x: Tensor) -> Tensor:
        return x.clamp(-self._given.limit, self._given.limit)


def _log_ratio(student: Tensor, seen: Tensor, mask: Tensor) -> Tensor:
    """log(teacher / student) of the sampled tokens, [T], clamped to ±20 and 0 outside the mask."""
    log_r = masked(seen[ROWS.index("logprobs")].detach() - student, mask)
    return log_r.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
