"""The path of `PolicyLoss` before it moved to asyncrl.learner.losses.policy_loss; kept for one release."""

from __future__ import annotations

import warnings

from asyncrl.learner.losses.policy_loss import PolicyLoss

__all__ = ["PolicyLoss"]

warnings.warn(
    "asyncrl.learner.policy_loss has moved: import PolicyLoss from asyncrl.learner.losses.policy_loss",
    DeprecationWarning,
    stacklevel=2,
)
