"""Kept ids: what truncated sampling (`actors.top_p`, `top_k`, `min_p`) left of the vocabulary for each sampled token.

    sampled token     a       b          c
    counts            2       0          3       0: more than `actors.max_kept` were left, and none is recorded
    ids             3 17             4 90 212    ascending within a token, the token's own id among them

The behaviour logprob is the one over these ids, and the learner takes its logprobs over the same ones. A token of count
0 carries no loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_KEPT = 4096
"""Most ids of one token in any record; a run's own bound is `actors.max_kept`."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptIds:
    """The kept ids of N sampled tokens, in their order. Both arrays are read only."""

    counts: npt.NDArray[np.uint16]
    """[N]"""
    ids: npt.NDArray[np.int32]
    """[sum of counts]"""

    def first(self, n: int) -> KeptIds:
        """Those of the first n tokens."""
        counts = self.counts[:n]
        return KeptIds(counts, self.ids[: int(counts.sum(dtype=np.int64))])

    def problem(self, own: npt.NDArray[np.int32]) -> str:
        """Why these cannot be the kept ids of the sampled tokens `own` [N]; empty: they can."""
        counts, ids = self.counts, self.ids
        if len(counts) != len(own):
            return f"has {len(counts)} counts, expected one for each of {len(own)} sampled tokens"
        total = int(counts.sum(dtype=np.int64))
        if len(ids) != total:
            return f"has {len(ids)} ids, and its counts add up to {total}"
        if not total:
            return ""
        if int(counts.max()) > MAX_KEPT:
            return f"has {int(counts.max())} ids for one token, expected at most {MAX_KEPT}"
        ascends = ids[1:] > ids[:-1]
        begins = counts[counts > 0].cumsum(dtype=np.int64)[:-1]
        ascends[begins - 1] = True  # from one token to the next
        if int(ids.min()) < 0 or not ascends.all():
            return "has ids of a token that are negative or do not ascend"
        if np.count_nonzero(ids == np.repeat(own, counts)) != np.count_nonzero(counts):
            return "has no id of the sampled token itself among those kept for it"
        return ""


def kept_ids(sets: Sequence[Sequence[int] | npt.NDArray[np.int32]], most: int) -> KeptIds:
    """Kept ids made of one set of ids per token, in any order; a set of more than `most` is not recorded."""
    taken = [kept if len(kept) <= most else _NONE for kept in sets]
    counts = np.fromiter(map(len, taken), np.uint16, len(taken))
    ids = np.concatenate([_NONE, *(np.asarray(kept, np.int32) for kept in taken)])
    token = np.repeat(np.arange(len(taken), dtype=np.int32), counts)
    if ((ids[1:] < ids[:-1]) & (token[1:] == token[:-1])).any():  # an engine may give them in any order
        _sort_each(ids, counts)
    return KeptIds(counts, ids)


def _sort_each(ids: npt.NDArray[np.int32], counts: npt.NDArray[np.uint16]) -> None:
    """Sorts `ids` within each token in place: the tokens of one count together, as the rows of a matrix."""
    begins = counts.cumsum(dtype=np.int64) - counts
    for count in np.unique(counts):
        places = begins[counts == count, None] + np.arange(count)
        ids[places] = np.sort(ids[places], axis=1)


def joined(parts: Sequence[KeptIds]) -> KeptIds:
    """The kept ids of the tokens of one part after another."""
    return KeptIds(
        np.concatenate([np.zeros(0, np.uint16), *(part.counts for part in parts)]),
        np.concatenate([_NONE, *(part.ids for part in parts)]),
    )


_NONE: npt.NDArray[np.int32] = np.zeros(0, np.int32)
