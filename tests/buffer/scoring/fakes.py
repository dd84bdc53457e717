"""A fake scorer: leases groups of a buffer in this process, and makes up scores that fit them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncrl.buffer.client.messages import GroupLease
from asyncrl.buffer.core import Buffer
from asyncrl.buffer.record import from_record
from asyncrl.trajectory import Trajectory
from asyncrl.wire.teacher_scores import GroupScores, TrajectoryScores, to_record

K = 2
SCORED = {"scored": True, "score_k": K}
"""Rules of a run with a teacher on servers."""


def lease(
    buffer: Buffer, credits: int = 100, now: float = 0.0, scorer: str = "scorer-0", held: Sequence[GroupLease] = ()
) -> list[GroupLease]:
    buffer.scoring.renew(now, scorer, [(each.group, each.attempt) for each in held], (), "")
    return list(buffer.issue_groups(now, scorer, credits).groups)


def of_trajectory(t: Trajectory, salt: int = 0, k: int = K) -> TrajectoryScores:
    ids = np.concatenate([row.token_ids[row.mask] for row in t.rows])
    rng = np.random.default_rng([salt, *ids.tolist()])
    words = np.stack([rng.permutation(50)[:k] for _ in ids]).astype(np.int32)
    logprobs = -np.sort(rng.uniform(1.0, 3.0, (len(ids), k)), axis=1).astype(np.float32)
    return TrajectoryScores(words, logprobs, -rng.uniform(1.0, 3.0, len(ids)).astype(np.float32))


def scores(
    buffer: Buffer, given: GroupLease, scorer: str = "scorer-0", salt: int = 0, teacher: str = "t1", k: int = K
) -> GroupScores:
    trajectories = [from_record(record) for record in buffer.records_of(given.group)]
    made = tuple(of_trajectory(t, salt, k) for t in trajectories)
    return GroupScores(given.branch, given.group, given.attempt, scorer, teacher, given.digests, made)


def bring(buffer: Buffer, made: GroupScores) -> str:
    return buffer.accept_scores(made, to_record(made))


def score_all(buffer: Buffer, now: float = 0.0, scorer: str = "scorer-0") -> list[int]:
    """Numbers of the groups that were scored."""
    given = lease(buffer, now=now, scorer=scorer)
    for each in given:
        assert bring(buffer, scores(buffer, each, scorer)) == "stored"
    return [each.group for each in given]
