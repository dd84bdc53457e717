"""The oldest and the newest version of a group, which are kept up to date instead of computed when they are read."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.buffer.ledger.group import Group, Received
from asyncrl.buffer.ledger.payloads import Location


@pytest.mark.parametrize("seed", range(5))
def test_oldest_and_newest_are_those_of_what_is_stored(seed: int) -> None:
    rng = np.random.default_rng(seed)
    group = Group(0, 0, 0, "t", 4, "in_flight")
    for _ in range(60):
        index, version = int(rng.integers(4)), int(rng.integers(9))
        versions = ((version, 3), (version + int(rng.integers(1, 3)), 2))
        taken = Received(0, "a", "d", Location(0, 0, 1, 0), versions, 9, 1, 0.0, "e", "done")
        group.store(index, None if rng.random() < 0.4 else taken)
        every = [v for r in group.stored if r is not None for v, _ in r.versions]
        assert (group.oldest, group.newest) == ((min(every), max(every)) if every else (None, None))
