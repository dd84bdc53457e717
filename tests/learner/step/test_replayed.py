"""What a step with replayed groups reports."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.buffer.client import BatchReply
from asyncrl.learner.step.replayed import new_trajectories, replay_metrics
from asyncrl.tracking.series import check
from tests.learner.tiny import random_trajectory


def a_reply(replayed: tuple[tuple[int, float], ...]) -> BatchReply:
    """Group g is of the versions g to g + 1; the learner's is 6."""
    rng = np.random.default_rng(0)
    played = [random_trajectory(g, i, rng, rows=2, versions=(g, g + 1)) for g in (2, 4, 5) for i in range(2)]
    ones, digests = (1.0,) * len(played), tuple(t.digest() for t in played)
    return BatchReply("ready", "", played, ones, digests, (2, 4, 5), replayed, 6, 0, None, False, False)


def test_replayed_groups_are_counted_with_their_age_and_the_sample_size_of_their_weights() -> None:
    reply = a_reply(((2, 1.0), (4, 0.5)))
    values = replay_metrics(reply)
    check(values)
    assert values["buffer/replay/groups"] == 2
    assert values["buffer/replay/age"] == (6 - 2 + 6 - 4) / 2
    assert values["buffer/replay/ess"] == pytest.approx(1.5**2 / (2 * 1.25))
    assert [t.id.group for t in new_trajectories(reply)] == [5, 5]


def test_a_batch_without_them_has_no_age() -> None:
    reply = a_reply(())
    assert replay_metrics(reply) == {"buffer/replay/groups": 0}
    assert new_trajectories(reply) is reply.trajectories
