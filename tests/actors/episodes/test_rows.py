from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncrl.actors.engines.protocol import Generation
from asyncrl.actors.episodes.rows import BranchingRows


def said(ids: Sequence[int]) -> Generation:
    n = len(ids)
    return Generation(np.array(ids, np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32), "stop")


def test_a_prompt_extends_the_longest_row_that_it_begins_with() -> None:
    """Two answers to one prompt, of which one begins the other: it goes on behind the one that it repeats whole."""
    branches = BranchingRows()
    new = [
        branches.add([1], said([2])),
        branches.add([1], said([2, 3])),
        branches.add([1, 2, 3, 7], said([8])),
        branches.add([1, 2, 3, 7], said([])),
    ]
    assert new == [1, 1, 1, 4], "tokens of the prompt that its row did not hold"
    rows = [(row.token_ids.tolist(), row.mask.astype(int).tolist()) for row in branches.freeze()]
    assert rows == [([1, 2], [0, 1]), ([1, 2, 3, 7, 8], [0, 1, 1, 0, 1])]
