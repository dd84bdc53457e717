"""Environments that block, die, or never return, for the tests of what they are hosted by."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import os
import stat
import threading
import time
from typing import Any

from asyncrl.actors.envs.protocol import Message, Task, Turn
from asyncrl.actors.envs.tool import Tool


class HostedCounter:
    """Done after `turns` messages; `blocks_s` is spent in a function that blocks, as users write them."""

    def __init__(self, turns: int = 1, blocks_s: float = 0.0) -> None:
        self._left, self._blocks_s = turns, blocks_s
        self.tools = [Tool.from_function(add)]
        self.reset_state = "begin"

    async def reset(self, task: Task) -> list[Message]:
        self._task = task
        return [{"role": "system", "content": str(task["prompt"])}]

    async def step(self, message: Message) -> Turn:
        time.sleep(self._blocks_s)  # noqa: ASYNC251
        what = self._task.get("what")
        if what == "die":
            os._exit(7)
        if what == "hang":
            time.sleep(1000)  # noqa: ASYNC251
        if what == "raise":
            raise ValueError("boom")
        if what == "half a pair":
            raise ValueError("no tool \ud800")
        if what == "half a pair at the exit":
            raise SystemExit(Unprintable())
        if str(what).startswith("raise "):
            raise getattr(builtins, str(what).partition(" ")[2])
        if what == "garbage":
            for number in map(int, os.listdir("/proc/self/fd")):
                with contextlib.suppress(OSError):
                    if number > 2 and stat.S_ISSOCK(os.fstat(number).st_mode):
                        os.write(number, self._task["bytes"])
            await asyncio.sleep(60)
        if what == "long":
            return Turn(messages=[{"role": "tool", "content": "x" * (33 << 20)}])
        self._left -= 1
        if self._left:
            return Turn(
                messages=[{"role": "tool", "content": "on"}], reward=0.5 - self._left / 4, state=bytes([self._left])
            )
        where = {"pid": float(os.getpid()), "thread": float(threading.get_native_id())}
        return Turn(reward=1.0, done=True, metrics=where, rewards={"success": 1.0})

    async def close(self) -> None:
        return None


class Unprintable:
    def __repr__(self) -> str:
        return "\ud800"


def add(a: int, b: int) -> Any:
    """Add two numbers."""
    return a + b
