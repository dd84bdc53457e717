"""Behaviour logprobs that bypass vLLM's outputs: an array in shared memory, written by its worker, read here.

    here: a request acquires a free row ──row, seed──> worker, or its GPU: samples, writes the k-th logprob to [row, k]
    here: the request has ended, with N tokens     <── reads [row, :N], releases the row

A value is written before its token leaves the worker, so the values of all tokens that arrived are complete. A row that
is acquired holds NaN until then, so that a missing value is noticed. A preempted request continues at its k. The last
write of an aborted request comes before the first of the row's next request, because vLLM handles both messages in
order, between two steps.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from asyncrl.trajectory import Float32

EXTRA = "asyncrl"
"""Key of [row, seed] in the extra arguments of vLLM's SamplingParams."""


class LogprobBoard:
    """Rows for running requests; a request waits while no row is free."""

    def __init__(self, path: Path, rows: int, room: int) -> None:
        """`rows` requests at once, of up to `room` tokens each. The file is sparse: unused rows take no memory."""
        self.path, self.rows, self.room = path, rows, room
        # The last row belongs to no request (gpu_sampler.py).
        self._values = np.memmap(path, np.float32, "w+", shape=(rows + 1, room)).view(np.ndarray)
        self._free: asyncio.LifoQueue[int] = asyncio.LifoQueue()
        for row in reversed(range(rows)):
            self._free.put_nowait(row)

    async def acquire(self, count: int) -> int:
        """A row for up to `count` tokens, at most `room`; waits until one is free."""
        row = await self._free.get()
        self._values[row, :count] = np.nan
        return row

    def read(self, row: int, count: int) -> Float32:
        """[count] a copy of the row's first values; NaN where the worker has written none."""
        return self._values[row, :count].copy()

    def release(self, row: int) -> None:
        self._free.put_nowait(row)
