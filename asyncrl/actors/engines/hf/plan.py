"""Plans one step of the embedded engine: which slots prefill together, which get their next token.

No model: slots in, parts of a forward pass out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from asyncrl.actors.engines.hf.forward import KVCache, Part, Rows
from asyncrl.actors.engines.hf.slots import Index, KVSlots, Tokens

PREFILL_TOKENS = 4096
"""Tokens, padding included, of one prefill pass."""
PART_TOKENS = 16
"""What one more part of a pass costs, in tokens of the pass: measured 0.15 to 0.3 ms against 20 us a token with the
quickstart's model on one core."""
KEY_BLOCK = 16
"""The cache is read up to the longest sequence rounded up to this."""


@dataclass(slots=True, eq=False)
class Planned:
    """The part of one step for some slots."""

    rows: Index
    """The slots that get a token."""
    chosen: Index
    """Their indices in `part`, which may hold other slots too."""
    part: Part
    prefilled: int
    """Prompt tokens in it."""


def share(s: KVSlots, cache: KVCache) -> int:
    """Copy cached prefixes from other slots to those that need them; returns the number of tokens."""
    before = int(s.cached.sum())
    for row in s.to_prefill().tolist():
        if donor := s.donor(row):
            source, shared = donor
            cache.copy(source, row, shared)
            s.cached[row] = shared
    return int(s.cached.sum()) - before


def prefill(s: KVSlots, scratch: int) -> Iterator[Planned]:
    """Slots whose tail is longer than one token, as many as fit; counts what is prefilled for each."""
    if len(rows := s.to_prefill()):
        rows = s.batch(rows, PREFILL_TOKENS)
        tails = s.length[rows] - s.cached[rows]
        parts = np.searchsorted(widths(tails), tails)
        for part in np.unique(parts):
            yield _prefill_part(s, rows[parts == part], scratch)


def widths(tails: Index) -> Index:
    """Widths, ascending, of the parts in which tails [n] of these lengths are prefilled, each padded to the next one:
    those for which the tokens with padding, and `PART_TOKENS` for each part, are fewest.

    >>> widths(np.array([3, 4, 40, 110, 113])).tolist()
    [4, 40, 113]
    """
    lengths, counts = np.unique(tails, return_counts=True)
    below = np.concatenate([[0], np.cumsum(counts)])
    fewest, begins = np.zeros(len(lengths) + 1, np.int64), np.zeros(len(lengths) + 1, np.int64)
    for end, width in enumerate(lengths.tolist(), 1):
        # The part of this width begins behind the first `begins[end]` lengths.
        tokens = fewest[:end] + width * (below[end] - below[:end]) + PART_TOKENS
        begins[end] = tokens.argmin()
        fewest[end] = tokens[begins[end]]
    chosen, end = [], len(lengths)
    while end:
        chosen.append(int(lengths[end - 1]))
        end = int(begins[end])
    return np.array(chosen[::-1], np.int64)


def _prefill_part(s: KVSlots, rows: Index, scratch: int) -> Planned:
    tails = s.length[rows] - s.cached[rows]
    columns = np.arange(tails.max())
    at = s.cached[rows][:, None] + columns
    real = columns < tails[:, None]
    positions = np.where(real, at, scratch)
    tokens = s.tokens[rows[:, None], np.where(real, at, 0)]
    part = _part(s, rows, tokens, positions, torch.from_numpy(rows), tails - 1)
    s.prefilled[rows] += tails
    return Planned(rows, np.arange(len(rows)), part, int(tails.sum()))


def decode(s: KVSlots, scratch: int) -> Iterator[Planned]:
    """Slots whose tail is the last sampled token."""
    rows = s.to_decode()
    if not len(rows):
        return
    top = int(rows[-1]) + 1
    # Compute all slots up to the last decoding one in place, unless so few decode that gathering them is cheaper.
    dense = 2 * len(rows) >= top
    computed = np.arange(top) if dense else rows
    chosen = rows if dense else np.arange(len(rows))
    positions = np.full(len(computed), scratch)
    positions[chosen] = s.length[rows] - 1
    tokens = s.tokens[computed, np.maximum(s.length[computed] - 1, 0)]
    place: Rows = slice(0, top) if dense else torch.from_numpy(rows)
    last = np.zeros(len(computed), np.int64)
    yield Planned(rows, chosen, _part(s, rows, tokens[:, None], positions[:, None], place, last), 0)


def _part(s: KVSlots, rows: Index, tokens: Tokens, positions: Index, place: Rows, last: Index) -> Part:
    longest = min(-(-int(s.length[rows].max()) // KEY_BLOCK) * KEY_BLOCK, s.room)
    return Part(torch.from_numpy(tokens).long(), torch.from_numpy(positions), place, torch.from_numpy(last), longest)
