"""Environments that count the actions on their state, and tell of every step that they make, in whichever process."""

from __future__ import annotations

import asyncio
import hashlib
import os
from typing import Any

import asyncrl

TURNS = 20


class Counting(asyncrl.Environment):
    """A turn's reward is the number of actions on the state so far; done after TURNS. A step sleeps, as tools do."""

    def __init__(self, log: str, sleep_s: float = 0.1) -> None:
        self._log, self._sleep_s = log, sleep_s
        self._count = 0

    async def reset(self, task: Any) -> list[dict[str, Any]]:
        self._key = f"{task['id']}/{task['episode']}"
        return [{"role": "user", "content": "count"}]

    async def step(self, message: Any) -> asyncrl.Turn:
        self._count += 1
        said = hashlib.blake2b((message["content"] or "").encode(), digest_size=8).hexdigest()
        line = f"{self._key} {self._count} {message['tokens']} {said} {os.getpid()}\n"
        file = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(file, line.encode())
        os.close(file)
        await asyncio.sleep(self._sleep_s)
        done = self._count == TURNS
        messages = [] if done else [{"role": "tool", "content": str(self._count)}]
        return asyncrl.Turn(messages=messages, reward=float(self._count), done=done)


class WithSnapshots(Counting):
    async def snapshot(self) -> bytes:
        return str(self._count).encode()

    async def restore(self, state: bytes) -> None:
        self._count = int(state)


class Again(Counting):
    replayable = True
