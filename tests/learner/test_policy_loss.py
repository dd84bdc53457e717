"""The path that docs promised before the move still works, and warns."""

from __future__ import annotations

import importlib
import sys

import pytest

from asyncrl.learner.losses import PolicyLoss


def test_the_old_path_warns_and_names_the_new_one() -> None:
    sys.modules.pop("asyncrl.learner.policy_loss", None)
    with pytest.warns(DeprecationWarning, match=r"asyncrl\.learner\.losses\.policy_loss"):
        old = importlib.import_module("asyncrl.learner.policy_loss")
    assert old.PolicyLoss is PolicyLoss
