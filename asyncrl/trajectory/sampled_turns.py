"""The sampled tokens of a trajectory, turn by turn: what recorded turns are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncrl.trajectory import Row, Span, Trajectory
from asyncrl.trajectory.kept_ids import KeptIds
from asyncrl.trajectory.turns import Tokens, tokens_digest


def turn_digest(trajectory: Trajectory, number: int, first: int | None = None) -> str | None:
    """`tokens_digest` of a turn's sampled tokens, or of the `first` of them; None: the trajectory has no such turn, or
    does not tell which tokens are of which turn."""
    if not 0 <= number < trajectory.turns:
        return None
    spans: Sequence[Span]
    if trajectory.turn_rewards:
        spans = trajectory.turn_rewards[number].spans
    elif trajectory.turns == 1:
        spans = _all_spans(trajectory)
    else:
        return None
    left, parts = first, []
    for span in spans:
        tokens = span.tokens if left is None else min(span.tokens, left)
        parts.append(_tokens(trajectory.rows[span.row], span.start, tokens))
        left = None if left is None else left - tokens
    return tokens_digest(parts)


def _tokens(row: Row, start: int, tokens: int) -> Tokens:
    end = start + tokens
    kept = None
    if row.kept is not None:
        before = int(np.count_nonzero(row.mask[:start]))
        until = row.kept.first(before + tokens)
        kept = KeptIds(until.counts[before:], until.ids[len(row.kept.first(before).ids) :])
    return row.token_ids[start:end], row.logprobs[start:end], row.versions[start:end], kept


def _all_spans(trajectory: Trajectory) -> list[Span]:
    """Each piece of sampled tokens."""
    spans = []
    for place, row in enumerate(trajectory.rows):
        edges = np.flatnonzero(np.diff(row.mask.astype(np.int8), prepend=0, append=0)).tolist()
        spans += [Span(place, start, end - start) for start, end in zip(edges[::2], edges[1::2], strict=True)]
    return spans
