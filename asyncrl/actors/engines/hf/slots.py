"""Tracks which sequence is in which slot, and how much of it is in the KV cache. Pure: no model, no threads, no clock.

A slot's sequence is `tokens[slot, :length]`; the first `cached` of its tokens have keys and values in the cache. The
rest is its **tail**: one token while it decodes, more before it is prefilled. A free slot keeps its sequence, so that a
later prompt with the same prefix can use its cache: the next turn of the same episode in place, another episode's
system prompt by copying.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from asyncrl.actors.engines.protocol import Generation, Sampling
from asyncrl.actors.engines.sampling import uniforms
from asyncrl.trajectory.kept_ids import kept_ids

Index = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]

WORTH_WAITING = 16
"""A prompt that shares this many tokens with one that is being prefilled waits for it, and copies."""


class KVSlots:
    """Arrays over `count` slots of `length` tokens each."""

    def __init__(self, count: int, length: int, vocab: int) -> None:
        self.room = length
        self.active = np.zeros(count, bool)
        self.tokens = np.zeros((count, length), np.int32)
        self.logprobs = np.zeros((count, length), np.float32)
        self.versions = np.zeros((count, length), np.int32)
        self.length = np.zeros(count, np.int64)
        self.cached = np.zeros(count, np.int64)
        self.prompt = np.zeros(count, np.int64)
        self.prefilled = np.zeros(count, np.int64)
        """Tokens computed for the slot's sequence, apart from those that it decoded."""
        self.limit = np.zeros(count, np.int64)
        self.noise = np.zeros((count, length), np.float64)
        self.temperature = np.ones(count, np.float32)
        self.greedy = np.zeros(count, bool)
        self.top_p = np.ones(count, np.float32)
        self.top_k = np.zeros(count, np.int64)
        self.min_p = np.zeros(count, np.float32)
        self.max_kept = np.zeros(count, np.int64)
        self.kept: list[list[Tokens]] = [[] for _ in range(count)]
        """Kept ids of each token sampled in a slot, where its request asks for kept ids."""
        self.stops = np.zeros((count, vocab), bool)
        self.pure = np.ones(count, bool)
        """Whether everything cached was computed with the weights in use."""
        self._freed = np.zeros(count, np.int64)
        self._clock = 0

    def place(self, prompt: Tokens, sampling: Sampling) -> int | None:
        """The slot for `prompt` (at least 1, fewer than `room` tokens), or None when all are in use.

        A slot whose whole cache is a prefix of the prompt holds the previous turn of the same episode; without one, it
        is the slot that has been free longest.
        """
        free = np.flatnonzero(~self.active)
        if not len(free):
            return None
        shared = self._shared(prompt, free)
        own = np.where(shared == self.cached[free], shared, 0)
        best = int(own.argmax()) if own.max() > 0 else int(self._freed[free].argmin())
        slot = int(free[best])
        if own[best] == 0 and not self.pure[slot]:
            shared[best], self.pure[slot] = 0, True
        n = len(prompt)
        self.tokens[slot, :n] = prompt
        self.active[slot] = True
        self.length[slot] = self.prompt[slot] = n
        self.cached[slot] = shared[best]
        self.prefilled[slot] = 0
        self.limit[slot] = min(n + sampling.max_new_tokens, self.room)
        self.noise[slot, : self.limit[slot] - n] = uniforms(sampling.seed, int(self.limit[slot]) - n)
        self.greedy[slot] = sampling.temperature == 0
        self.temperature[slot] = sampling.temperature or 1.0
        self.top_p[slot], self.top_k[slot], self.min_p[slot] = sampling.top_p, sampling.top_k, sampling.min_p
        self.max_kept[slot], self.kept[slot] = sampling.max_kept, []
        self.stops[slot] = False
        self.stops[slot, list(sampling.stop_token_ids)] = True
        return slot

    def output(self, slot: int, reason: Literal["stop", "length", "abort"], queue_s: float | None) -> Generation:
        """The tokens sampled in a slot."""
        part = slice(int(self.prompt[slot]), int(self.length[slot]))
        arrays: tuple[npt.NDArray[Any], ...] = (self.tokens, self.logprobs, self.versions)
        token_ids, logprobs, versions = (array[slot, part].copy() for array in arrays)
        most = int(self.max_kept[slot])
        kept = kept_ids(self.kept[slot], most) if most else None
        return Generation(token_ids, logprobs, versions, reason, queue_s, int(self.prefilled[slot]), kept)

    def truncated(self, rows: Index) -> bool:
        """Whether fewer tokens than the vocabulary holds can be sampled in some of these slots."""
        return bool((self.top_p[rows] < 1).any() or (self.top_k[rows] > 0).any() or (self.min_p[rows] > 0).any())

    def keep(self, rows: Index, kept: Sequence[Tokens | None]) -> None:
        """Record the kept ids of the next token of each row; None where they were not asked for."""
        for row, ids in zip(rows.tolist(), kept, strict=True):
            if ids is not None:
                self.kept[row].append(ids)

    def release(self, slot: int) -> None:
        self._clock += 1
        self._freed[slot] = self._clock
        self.active[slot] = False

    def to_prefill(self) -> Index:
        """Active slots with a tail of more than one token."""
        return np.flatnonzero(self.active & (self.length - self.cached > 1))

    def to_decode(self) -> Index:
        """Active slots with a tail of one token."""
        return np.flatnonzero(self.active & (self.length - self.cached == 1))

    def donor(self, slot: int) -> tuple[int, int] | None:
        """(another slot, n): its first n cached positions equal those of `slot`, which has fewer cached."""
        others = np.flatnonzero(self.pure & (self.cached > self.cached[slot]))
        if not len(others):
            return None
        shared = self._shared(self.tokens[slot, : self.length[slot]], others)
        best = int(shared.argmax())
        return (int(others[best]), int(shared[best])) if shared[best] > self.cached[slot] else None

    def batch(self, rows: Index, max_tokens: int) -> Index:
        """The `rows` (with a tail) to prefill together: at most `max_tokens` with padding, at least one row, and none
        that could soon copy from another."""
        tails = self.length[rows] - self.cached[rows]
        chosen: list[int] = []
        widest = 0
        for row in rows[np.argsort(tails, kind="stable")[::-1]].tolist():
            widest = max(widest, int(self.length[row] - self.cached[row]))
            if chosen and widest * (len(chosen) + 1) > max_tokens:
                break
            n = int(self.length[row])
            if chosen and self._common(self.tokens[row, :n], chosen).max() >= self.cached[row] + WORTH_WAITING:
                continue
            chosen.append(row)
        return np.array(sorted(chosen), np.int64)

    def record(
        self, rows: Index, tokens: Index, logprobs: npt.NDArray[np.float32], version: int
    ) -> tuple[Index, Index]:
        """Record one sampled token per row. Returns the rows that ended with a stop token, and those out of room."""
        at = self.length[rows]
        self.tokens[rows, at] = tokens
        self.logprobs[rows, at] = logprobs
        self.versions[rows, at] = version
        self.cached[rows] = at
        self.length[rows] = at + 1
        stopped = self.stops[rows, tokens]
        return rows[stopped], rows[~stopped & (at + 1 >= self.limit[rows])]

    def weights_changed(self, recompute: bool) -> None:
        """Forget the cache, or keep it for its own sequences only."""
        if recompute:
            self.cached[:] = 0
        self.pure[:] = recompute

    def _shared(self, prompt: Tokens, slots: Index) -> Index:
        """Number of positions of `prompt`, at most all but the last, that each slot has cached."""
        return np.minimum(np.minimum(self._common(prompt, slots), self.cached[slots]), len(prompt) - 1)

    def _common(self, prompt: Tokens, slots: Index | Sequence[int]) -> Index:
        """Length of the common prefix with each slot's tokens (those after a slot's length are garbage)."""
        same = self.tokens[slots, : len(prompt)] == prompt
        return np.where(same.all(1), len(prompt), same.argmin(1))
