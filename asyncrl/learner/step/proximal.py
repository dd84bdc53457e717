"""A-3PO: proximal logprobs without the forward that computes them."""

from __future__ import annotations

import torch
from torch import Tensor


def approximate_proximal(behaviour: Tensor, current: Tensor, token_versions: Tensor, version: int) -> Tensor:
    """Log-linear between who sampled the token and the policy being optimised (2512.06547; AReaL `loglinear`), `[T]`.

    The learner makes version + 1 out of `version`, and a token was sampled at u = `token_versions[T]`: the proximal
    policy lies alpha = (version - u) / (version + 1 - u) of the way from behaviour to current, alpha within [0, 1], and
    0 for a token without a version (u < 0). At u = version it is the behaviour itself. Constant.
    """
    steps = (version + 1 - token_versions).to(behaviour.dtype)
    alpha = torch.where(steps > 0, (steps - 1) / steps.clamp(min=1), 0.0).clamp(0, 1)
    alpha = torch.where(token_versions < 0, 0.0, alpha)
    return (behaviour + alpha * (current.detach() - behaviour)).detach()
