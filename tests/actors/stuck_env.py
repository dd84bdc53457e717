"""An environment whose tool never returns, in a thread that nobody can end."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from asyncrl.actors.envs.lookup import LookupEnv
from asyncrl.actors.envs.protocol import Turn


class StuckEnv(LookupEnv):
    async def step(self, message: Any) -> Turn:
        await asyncio.to_thread(time.sleep, 1000)
        return Turn(done=True)
