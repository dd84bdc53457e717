"""The rows of a trajectory, built from generations: mask, logprob and version of each token.

A sampled token carries loss at exactly one place in one row; elsewhere it is context.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncrl.actors.engines.protocol import Generation
from asyncrl.actors.episodes.turn_rewards import Spans
from asyncrl.trajectory import CONTEXT, Float32, Int32, Row, Span
from asyncrl.trajectory.kept_ids import joined


class OpenRow:
    """A growing row. `freeze` cuts off the context after its last sampled token, which trains nothing."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.ids: list[int] = list(prompt)
        self._parts: list[tuple[int, Generation]] = []

    @property
    def sampled_any(self) -> bool:
        return bool(self._parts)

    @property
    def last_sampled(self) -> int:
        """Number of tokens of the last generation."""
        return len(self._parts[-1][1].token_ids) if self._parts else 0

    @property
    def behind(self) -> int:
        """Number of tokens behind the last generation; of all without one."""
        return len(self.ids) - (self._parts[-1][0] + self.last_sampled if self._parts else 0)

    def context(self, ids: Sequence[int]) -> None:
        self.ids.extend(ids)

    def sampled(self, generation: Generation) -> None:
        self._parts.append((len(self.ids), generation))
        self.ids.extend(generation.token_ids.tolist())

    def spans(self, row: int) -> list[Spans]:
        """Of each generation, in order; `row`: the place of this row in its trajectory."""
        return [_span(row, start, part) for start, part in self._parts]

    def freeze(self) -> Row:
        last, generation = self._parts[-1]
        n = last + len(generation.token_ids)
        token_ids: Int32 = np.array(self.ids[:n], np.int32)
        mask = np.zeros(n, np.bool_)
        logprobs: Float32 = np.zeros(n, np.float32)
        versions: Int32 = np.full(n, CONTEXT, np.int32)
        for at, part in self._parts:
            span = slice(at, at + len(part.token_ids))
            mask[span], logprobs[span], versions[span] = True, part.logprobs, part.versions
        for array in (token_ids, mask, logprobs, versions):
            array.flags.writeable = False
        kept = [part.kept for _, part in self._parts if part.kept is not None]
        if len(kept) not in (0, len(self._parts)):
            raise ValueError("some generations of a row have kept ids and others none: expected all, or none")
        return Row(token_ids, mask, logprobs, versions, joined(kept) if kept else None)


def spans(rows: Sequence[OpenRow]) -> list[Spans]:
    """Of each turn of an episode whose rows follow one another."""
    return [one for place, row in enumerate(rows) for one in row.spans(place)]


def _span(row: int, start: int, generation: Generation) -> Spans:
    sampled = len(generation.token_ids)
    return (Span(row, start, sampled),) if sampled else ()


class BranchingRows:
    """Rows of generations in any order: of parallel conversations, and of conversations that branch."""

    def __init__(self) -> None:
        self._rows: list[OpenRow] = []
        self.spans: list[Spans] = []
        """Of each generation that was added, in that order."""

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, prompt: Sequence[int], generation: Generation) -> int:
        """Add a generation after `prompt`: to the longest row that is, token by token, a prefix of `prompt`; otherwise
        to a new row, in which the prompt is context even where another row sampled it. Returns how many tokens of the
        prompt its row did not hold."""
        if not len(generation.token_ids):
            self.spans.append(())
            return len(prompt)
        prompt = list(prompt)
        prefixes = [row for row in self._rows if row.ids == prompt[: len(row.ids)]]
        if prefixes:
            row = max(prefixes, key=lambda row: len(row.ids))
            row.context(prompt[len(row.ids) :])
        else:
            row = OpenRow(prompt)
            self._rows.append(row)
        self.spans.append(_span(next(i for i, r in enumerate(self._rows) if r is row), len(row.ids), generation))
        new = row.behind
        row.sampled(generation)
        return new

    def freeze(self) -> tuple[Row, ...]:
        return tuple(row.freeze() for row in self._rows)
