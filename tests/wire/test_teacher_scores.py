"""A record of scores: what comes back is what went in, and no damaged one is taken for scores."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import numpy as np
import pytest

from asyncrl.trajectory import LogHead
from asyncrl.wire import WireError
from asyncrl.wire.teacher_scores import GroupScores, TrajectoryScores, from_record, to_record


def some(k: int = 3, n: tuple[int, ...] = (4, 1)) -> GroupScores:
    rng = np.random.default_rng(0)
    made = tuple(
        TrajectoryScores(
            np.stack([rng.permutation(99)[:k] for _ in range(t)]).astype(np.int32),
            -rng.uniform(2, 4, (t, k)).astype(np.float32),
            -rng.uniform(2, 4, t).astype(np.float32),
        )
        for t in n
    )
    return GroupScores(1, 7, 2, "scorer-0", "teacher", ("a", "bb"), made, LogHead(3, "head"))


@pytest.mark.parametrize("k", [0, 1, 3])
def test_a_record_comes_back(k: int) -> None:
    scores = some(k)
    back = from_record(to_record(scores))
    assert back.digest() == scores.digest()
    assert (back.k, back.attempt, back.scorer, back.logged) == (k, 2, "scorer-0", LogHead(3, "head"))
    assert not back.scores[0].sampled.flags.writeable


def test_the_digest_covers_what_is_trained_on_and_not_who_brought_it() -> None:
    scores = some()
    assert replace(scores, attempt=9, scorer="x", logged=None).digest() == scores.digest()
    first = scores.scores[0]
    for other in (
        replace(scores, teacher="t2"),
        replace(scores, trajectories=("a", "c")),
        replace(scores, scores=(replace(first, sampled=first.sampled - 1), scores.scores[1])),
        replace(scores, scores=(replace(first, ids=first.ids[:, ::-1]), scores.scores[1])),
    ):
        assert other.digest() != scores.digest()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"sampled": [np.nan] * 4}, "not finite"),
        ({"sampled": [-np.inf] * 4}, "not finite"),
        ({"sampled": [0.5] * 4}, r"reach 0\.5, expected at most 0"),
        ({"ids": [[1, 2, 1]] * 4}, "name a word twice"),
        ({"ids": [[1, 2, -1]] * 4}, "hold -1"),
        ({"logprobs": [[-0.1, -0.1, -3]] * 4}, "add up to 1"),
    ],
)
def test_numbers_that_no_distribution_has(change: dict[str, list[float]], why: str) -> None:
    scores = some()
    first = scores.scores[0]
    arrays = {name: np.asarray(value, getattr(first, name).dtype) for name, value in change.items()}
    with pytest.raises(WireError, match=why):
        from_record(to_record(replace(scores, scores=(replace(first, **arrays), scores.scores[1]))))


def test_no_damaged_record_raises_anything_else() -> None:
    whole, rng = to_record(some()), random.Random(0)
    for _ in range(3000):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        if rng.random() < 0.3:
            del damaged[rng.randrange(len(damaged)) :]
        with contextlib.suppress(WireError):
            from_record(bytes(damaged))
