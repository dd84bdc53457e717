"""Behaviour logprobs past vLLM's output path: an array in shared memory, written by its worker, read by this process.

    here: a request takes a free row ──row, seed──> worker: samples, writes the k-th logprob to [row, k]
    here: the request has ended, with N tokens  <── reads [row, :N], gives the row back

A value is written before the token leaves the worker, so what is read for a token that has arrived is complete. A
preempted request goes on at its k; a request that was aborted has its last write behind it when the row's next one
begins, because vLLM handles both messages in order, between two steps.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from asyncrl.trajectory import Float32

EXTRA = "asyncrl"
"""Key of [row, seed] in the extra arguments of vLLM's SamplingParams."""


class Board:
    """Rows lent to requests; a request that finds none free waits for one."""

    def __init__(self, path: Path, rows: int, room: int) -> None:
        """`rows` requests at once, of up to `room` tokens each. The file is sparse: what is unused takes no memory."""
        self.path, self.rows, self.room = path, rows, room
        self._values = np.memmap(path, np.float32, "w+", shape=(rows, room)).view(np.ndarray)
        self._free: asyncio.LifoQueue[int] = asyncio.LifoQueue()
        for row in reversed(range(rows)):
            self._free.put_nowait(row)

    async def take(self) -> int:
        return await self._free.get()

    def read(self, row: int, count: int) -> Float32:
        """[count] a copy."""
        return self._values[row, :count].copy()

    def give_back(self, row: int) -> None:
        self._free.put_nowait(row)
