"""An environment whose turns sleep for a known time, and write down how long they did."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import asyncrl

SLEEP_S = 0.15


class Sleeping(asyncrl.Environment):
    """Two turns an episode; `folder` gets a line per turn with the seconds slept."""

    def __init__(self, folder: str) -> None:
        self._file = Path(folder) / f"slept-{os.getpid()}.jsonl"
        self._turns = 0

    async def reset(self, task: Mapping[str, Any]) -> list[dict[str, str]]:
        self._turns = 0
        return [{"role": "user", "content": "12 + 7 ="}]

    async def step(self, message: Mapping[str, Any]) -> asyncrl.Turn:
        began = time.perf_counter()
        await asyncio.sleep(SLEEP_S)
        with self._file.open("a") as file:
            file.write(json.dumps(time.perf_counter() - began) + "\n")
        self._turns += 1
        if self._turns == 1:
            return asyncrl.Turn(messages=[{"role": "user", "content": "3 + 4 ="}])
        return asyncrl.Turn(reward=float(len(str(message["content"])) % 2), done=True)
