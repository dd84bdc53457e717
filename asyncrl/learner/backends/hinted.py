"""A micro-batch as its teacher reads it: with its hints within the rows."""

from __future__ import annotations

from dataclasses import replace

import torch

from asyncrl.learner.backends.protocol import Packed


def with_hints(part: Packed) -> Packed:
    """The part whose rows hold their hints; its mask has the same tokens in the same order, and none of a hint."""
    if part.hints is None:
        return part
    hints, ids, mask = part.hints, [], []
    rows = zip(torch.split(part.token_ids, [*part.lengths]), torch.split(part.mask, [*part.lengths]), strict=True)
    of_each = zip(rows, torch.split(hints.token_ids, [*hints.lengths]), hints.places, strict=True)
    for (row, sampled), hint, place in of_each:
        ids += [row[:place], hint.to(row), row[place:]]
        mask += [sampled[:place], torch.zeros(len(hint), dtype=torch.bool), sampled[place:]]
    lengths = tuple(a + b for a, b in zip(part.lengths, hints.lengths, strict=True))
    return replace(part, token_ids=torch.cat(ids), mask=torch.cat(mask), lengths=lengths, hints=None)
